"""Find what the added lines of a patch use that one release has, and another one lacks.

A merge can have no conflict, although upstream removed a header that the patch includes, renamed a
member that it uses, or added a parameter to a function that it calls. The sources of both
releases are compared by text: no line is compiled.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyllamakv.patching.hunks import FilePatch, Patch

#: Folders of headers that every file may include.
INTERFACES = frozenset({"include", "ggml/include"})

_SUFFIXES = (".c", ".cpp", ".h", ".hpp")
#: A name that means the same in both releases: one word can be any local variable, or English.
_NAME = re.compile(r"[A-Za-z]\w*_\w*")
_TEMPLATE = r"<(?:[^<>;{}]|<(?:[^<>;{}]|<[^<>;{}]*>)*>)*>"
#: A type, and the name that is declared with it: as a statement or a parameter.
_DECLARED = re.compile(
    rf"(?<![^;{{}}(,])\s*(?:template\s*{_TEMPLATE}\s*)?"
    rf"((?:\w+(?:::\w+)*(?:{_TEMPLATE})?(?:\s*(?:\*+|&)\s*|&&\s*|\s+))+)"
    rf"({_NAME.pattern})\s*(?=[(;,){{\[]|=(?!=))"
)
#: A type with a mark of a pointer or a reference, which is the sign of an operator after a value.
_POINTER = re.compile(rf"(\w+)({_TEMPLATE})?\s*[&*]+\s*\Z")
_TYPE = re.compile(
    r"\b(?:struct|enum\s+class|class|enum|union|using|typename)\s+(\w+)|\btypedef\b[^;{]*?\b(\w+)\s*;"
)
_BUILTIN = frozenset({"auto", "bool", "char", "double", "float", "int", "long", "short", "unsigned",
                      "void"})  # fmt: skip
_STATEMENTS = frozenset({"return", "case", "else", "throw", "new", "delete", "goto", "do"})
#: A line of the preprocessor, or a label: a statement can follow.
_LABEL = re.compile(
    r"^\s*(?:#.*|(?:public|private|protected|default|case\b(?:::|[^:;\n])*)\s*:(?!:))", re.MULTILINE
)
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_IGNORED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
#: Maximum number of characters of the arguments of a call.
_LONGEST = 2000


@dataclass(frozen=True)
class Sources:
    """The sources in some folders of a release, by path."""

    files: Mapping[str, str]

    @cached_property
    def text(self) -> str:
        """Return all sources without comments and literals."""
        return "\n".join(_IGNORED.sub('""', text) for text in self.files.values())

    @cached_property
    def names(self) -> frozenset[str]:
        """Return every name of several words in the sources."""
        return frozenset(_NAME.findall(self.text))

    @cached_property
    def types(self) -> frozenset[str]:
        """Return every name of a type that the sources declare."""
        return frozenset(name for found in _TYPE.findall(self.text) for name in found if name)

    def arguments(self, functions: Iterable[str]) -> dict[str, set[int]]:
        """Return the numbers of arguments that calls and declarations of functions have."""
        wanted = "|".join(sorted(functions))
        found: dict[str, set[int]] = {name: set() for name in functions}
        for match in re.finditer(rf"\b({wanted})\s*\(", self.text) if wanted else ():
            found[match[1]].add(_count(self.text, match.end()))
        return found


def is_source(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is a source file in one of some folders."""
    return path.endswith(_SUFFIXES) and posixpath.dirname(path) in folders


def folders(patch: Patch) -> frozenset[str]:
    """Return the folders whose files the added lines of a patch can use."""
    return INTERFACES | {posixpath.dirname(file.path) for file in patch.files}


def lost(patch: Patch, before: Sources, after: Sources) -> str:
    """Return the first thing that a patch adds and that only the sources before have, or nothing.

    It is an included file, a name, or a call with this number of arguments. What the patch itself
    defines is in neither.
    """
    added = [(file.path, list(_added(file))) for file in patch.files]
    for path, lines in added:
        for line in lines:
            text = line.decode("utf-8", "replace")
            if match := _INCLUDE.match(text):
                name = posixpath.join(posixpath.dirname(path), match[1])
                if name in before.files and name not in after.files:
                    return f"`{name}`"
    code = Sources({path: b"".join(lines).decode("utf-8", "replace") for path, lines in added})
    own = set(_declared(code.text, before.types | after.types | code.types))
    for name in dict.fromkeys(_NAME.findall(code.text)):
        if name in before.names and name not in after.names | own:
            return f"`{name}`"
    used = set(re.findall(rf"\b({_NAME.pattern})\s*\(", code.text)) & before.names - own
    old, new = before.arguments(used), after.arguments(used)
    for name, counts in code.arguments(used).items():
        gone = sorted((counts & old[name]) - new[name])
        if gone:
            return f"`{name}` with {gone[0]} arguments"
    return ""


def _added(file: FilePatch) -> Iterator[bytes]:
    """Yield the added lines; a semicolon separates lines that are not adjacent in the file."""
    for hunk in file.hunks:
        yield b";\n"
        for kind, lines in itertools.groupby(hunk.lines, key=lambda line: line[:1]):
            if kind == b"+":
                yield from (line[1:] for line in lines)
            elif kind == b" ":
                yield b";\n"


def _declared(text: str, types: frozenset[str]) -> Iterator[str]:
    """Yield the names that a text declares; the operators of `a * b` and `a & b` are no marks."""
    text = _LABEL.sub(";", text.replace('""', " "))  # comments are `""` here
    for kind, name in _DECLARED.findall(text):
        words = kind.split()
        if words[-1] in _STATEMENTS:
            continue
        pointer = _POINTER.search(kind)
        word = pointer[1] if pointer and not pointer[2] else ""
        known = word in types or word in _BUILTIN or word.endswith("_t")
        if not word or known or words[0] == "const" or "std::" in kind:
            yield name


def _count(text: str, start: int) -> int:
    """Return the number of arguments after an opening bracket; -1 if they do not end soon."""
    depth, commas = 1, 0
    filled = False
    for at in range(start, min(start + _LONGEST, len(text))):
        sign = text[at]
        depth += (sign in "([{") - (sign in ")]}")
        if not depth:
            return commas + filled
        commas += sign == "," and depth == 1
        filled = filled or not sign.isspace()
    return -1
