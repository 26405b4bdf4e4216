"""Find the function that a hunk was written for, and the one that encloses a place in a file.

Git writes a heading after a hunk's ranges: the last line before the hunk that begins with a letter,
``_`` or ``$``, at most 80 bytes of it. In C and C++ that is usually the signature of the function.
Signatures change between releases, so functions are compared by name.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.hunks import Hunk

#: Git cuts a heading here; `diff -p` cuts it at 40 bytes.
_LONGEST, _SHORTEST_CUT = 80, 40
#: Maximum number of bytes of a line that are parsed; hostile lines have megabytes.
_MOST = 2000

_SUFFIXES = (
    *(".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inl"),
    *(".cu", ".cuh", ".hip", ".cl", ".m", ".mm", ".metal", ".comp"),
)
_BLANKS = b" \t\r\n"
_START = re.compile(rb"[A-Za-z_$]")
_LABEL = re.compile(r"[A-Za-z_]\w*\s*:(?!:)\s*$")
_NOTE = re.compile(r"/\*.*?(?:\*/|$)|//.*", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'')
_TEMPLATE = re.compile(r"<[^<>(){};]*>")
_FUNCTION = re.compile(
    r"((?:::)?(?:[A-Za-z_~]\w*\s*::\s*)*"
    r"(?:operator\s*(?:\(\s*\)|[^\s\w(]+|[\w\s:*&]+)|~?[A-Za-z_]\w*))\s*\("
)
_TYPE = re.compile(
    r"(?:typedef\s+)?(?:class|struct|union|enum(?:\s+(?:class|struct))?|namespace)\s+"
    r"([A-Za-z_][\w:]*)"
)
_VARIABLE = re.compile(r"([A-Za-z_][\w:]*)\s*(?:\[[^\]]*\]\s*)*=(?!=)")
#: Attributes and macros that take arguments in a signature.
_MACRO = re.compile(r"__\w+|alignas|decltype|noexcept|requires|explicit|[A-Z][A-Z0-9_]+")


def written(hunk: Hunk) -> bytes:
    """Return the heading after the ranges of a hunk; empty if it has none."""
    return hunk.head.split(b"@@", 2)[2].strip(_BLANKS)


def expected(hunk: Hunk, path: str) -> bytes:
    """Return the heading of the function that a hunk was written for, or nothing if unknown.

    It is unknown in languages other than C and C++, without a heading, and if the heading is a
    label or a complete declaration. It is also unknown if a function begins or ends in the hunk
    before the first change: the change is then not in the function of the heading.
    """
    head = _cut(written(hunk))
    if PurePosixPath(path).suffix.lower() not in _SUFFIXES or _loose(head):
        return b""
    for line in hunk.lines:
        text = line[1:]
        if text[:1] == b"}" or (_START.match(text) and not _label(text)):
            return b""
        if line[:1] in (b"+", b"-") and text.strip(_BLANKS):
            break
    return head


def name(heading: bytes) -> str:
    """Return the name of the function, type or variable in a heading, else the whole line."""
    text = _plain(heading)
    while _TEMPLATE.search(text):
        text = _TEMPLATE.sub("", text)
    variable = _VARIABLE.search(text)
    if variable and "(" not in text[: variable.start()] and "operator" not in text:
        return variable[1]
    for found in _FUNCTION.finditer(text):
        if not _MACRO.fullmatch(found[1]):
            return "".join(found[1].split())
    kind = _TYPE.match(text)
    return kind[1] if kind else " ".join(text.split())


def bodies(lines: Sequence[bytes]) -> dict[str, set[bytes]]:
    """Return the lines of each function, type and variable in a file, by name with its class.

    The heading is one of them.
    """
    found: dict[str, set[bytes]] = {}
    current: set[bytes] = set()
    for line in lines:
        if _START.match(line) and not _label(line):
            current = found.setdefault(name(_cut(line)), set())
            current.add(line.strip(_BLANKS))
        elif line[:1] == b"}":
            current = set()
        elif text := line.strip(_BLANKS):
            current.add(text)
    return found


class Headings:
    """Index the headings of a file."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines

    @cached_property
    def _starts(self) -> list[int]:
        return [number for number, line in enumerate(self._lines) if _START.match(line)]

    def git(self, at: int) -> bytes:
        """Return the heading that git writes for a hunk whose first line has this index."""
        before = bisect_left(self._starts, at)
        return _cut(self._lines[self._starts[before - 1]]) if before else b""

    def enclosing(self, at: int) -> bytes:
        """Return the heading of the block that encloses a line; nothing at file level.

        Labels, and declarations that end before the line, are skipped.
        """
        for number in reversed(range(bisect_left(self._starts, at))):
            start = self._starts[number]
            if _label(self._lines[start]) or _declares(self._lines, start, at):
                continue
            closed = any(line[:1] == b"}" for line in islice(self._lines, start + 1, at))
            return b"" if closed else _cut(self._lines[start])
        return b""

    def same(self, head: bytes, at: int) -> bool:
        """Return whether the function of a heading encloses a line."""
        there = self.git(at)
        if there == head or (len(head) >= _SHORTEST_CUT and there.startswith(head)):
            return True
        return name(head) in (name(there), name(self.enclosing(at)))

    def differs(self, head: bytes, at: int) -> bytes:
        """Return the heading of the block that encloses a line, if it is another function.

        Returns nothing for a line at file level: no function encloses it.
        """
        return b"" if not head or self.same(head, at) else self.enclosing(at)


def _cut(line: bytes) -> bytes:
    # git omits a character that the limit would cut
    return line[:_LONGEST].rstrip(_BLANKS).decode("utf-8", "ignore").encode()


def _plain(line: bytes) -> str:
    text = line[:_MOST].decode("utf-8", "replace")
    return _NOTE.sub("", _QUOTED.sub('""', text)).strip()


def _label(line: bytes) -> bool:
    return _LABEL.match(_plain(line)) is not None


def _loose(head: bytes) -> bool:
    """Return whether a heading encloses nothing: it is empty, a label or a declaration."""
    text = _plain(head)
    return not text or _label(head) or text.endswith((";", "}"))


def _declares(lines: Sequence[bytes], start: int, end: int) -> bool:
    """Return whether a declaration, or a function of one line, ends within a range of lines."""
    depth = 0
    for number in range(start, end):
        text = _plain(lines[number])
        for sign in text:
            depth += (sign in "([") - (sign in ")]")
            if depth <= 0 and sign == "{":
                return number == start and text.endswith(("}", "};"))
            if depth <= 0 and sign == ";":
                return True
    return False
