"""Find the data members of the classes of a C++ source, and the functions defined in them.

Declarations are found by their text. A member whose type contains parentheses, such as
``std::function<void()>``, is taken for a function.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_IGNORED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_CLASS = re.compile(r"(?<!\w)(?<!enum )(?:class|struct)\s+(\w+)[^;{}()=<>]*\{")
_LABEL = re.compile(r"(?:public|private|protected)\s*:(?!:)")
_VALUE = re.compile(r"\s*(?:=(?!=)|\{).*", re.DOTALL)
_OTHER = re.compile(r"(?:using|typedef|friend|enum|class|struct|union|static|template)\b")


class Class(NamedTuple):
    """The type and name of each data member, and the head of each function with its body."""

    members: frozenset[str]
    functions: dict[str, str]

    def used(self, function: str) -> int:
        """Return how many data members the body of a function uses."""
        names = set(_NAME.findall(self.functions[function]))
        return sum(_NAME.findall(member.partition("[")[0])[-1] in names for member in self.members)


def plain(source: str) -> str:
    """Return a source without comments and literals, with single spaces."""
    return " ".join(_IGNORED.sub(" ", source).split())


def classes(source: str) -> dict[str, Class]:
    """Return the classes and structs of a source by name; blanks are single spaces.

    Initial values are omitted, and so are static members and nested types.
    """
    text = _DIRECTIVE.sub("", _IGNORED.sub(" ", source))
    found = {}
    for match in _CLASS.finditer(text):
        members: set[str] = set()
        functions: dict[str, str] = {}
        for statement in _statements(text, match.end()):
            own = "operator" in statement
            head = statement.partition("{")[0] if own else _VALUE.sub("", statement)
            head = " ".join(head.split())
            if _OTHER.match(head) or not head:
                continue
            if "(" not in head:
                members.add(head)
            elif statement.endswith("}"):
                functions[head] = statement[len(statement.partition("{")[0]) :]
        found[match[1]] = Class(frozenset(members), functions)
    return found


def _statements(text: str, start: int) -> list[str]:
    """Return the declarations of the class whose body begins at an offset."""
    found = []
    depth, first = 0, start
    for at in range(start, len(text)):
        sign = text[at]
        depth += (sign in "{(") - (sign in "})")
        if depth < 0:
            break
        # A body ends a declaration; an initial value or a nested type is followed by a semicolon.
        body = sign == "}" and "(" in text[first:at].partition("{")[0]
        if not depth and (sign == ";" or body):
            found.append(_LABEL.sub("", text[first : at + (sign != ";")]).strip())
            first = at + 1
    return found
