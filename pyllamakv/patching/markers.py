"""Propose markers for a new port: lines that its base has and the other bases lack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyllamakv.patching import cpp_lines, definition, hunk_locator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.patching.definition import Marker
    from pyllamakv.patching.draft import Tree
    from pyllamakv.patching.hunks import FilePatch, Patch

_LENGTH = range(16, 96)


def propose(patch: Patch, tree: Tree, others: Iterable[Tree] = ()) -> tuple[Marker, ...]:
    """Return markers that hold in ``tree``: per changed file one line, new files must be absent.

    Of the lines that a file's hunks rest on, the one that most of the ``others`` lack is taken,
    and of those the longest: it says most about the place.
    """
    seen = tuple(others)
    found: list[Marker] = []
    absent: list[Marker] = []
    for file in patch.files:
        if file.old is None:
            absent.append(definition.Marker(file.path, exists=False))
            continue
        line = _line(file, file.old, tree, seen)
        if line:
            found.append(definition.Marker(file.old, has=(line,)))
        else:
            found.append(definition.Marker(file.old, exists=True))
    return (*found, *absent)


def _line(file: FilePatch, path: str, tree: Tree, others: Sequence[Tree]) -> str:
    there = tree.entry(path)
    if there is None:
        return ""
    lines = hunk_locator.lines_of(there.data)
    elsewhere = [e.data if e else b"" for e in (other.entry(path) for other in others)]
    best: tuple[tuple[int, int], str] = ((-1, -1), "")
    for raw in dict.fromkeys(line for hunk in file.hunks for line in hunk.old):
        line = raw.strip()
        if len(line) not in _LENGTH or not line.isascii() or not cpp_lines.tells(raw):
            continue
        if lines.count(raw) != 1:
            continue
        lacking = sum(line not in data for data in elsewhere)
        best = max(best, ((lacking, len(line)), line.decode()))
    return best[1]


def table(base: str, era: str, requires: Sequence[str], markers: Sequence[Marker]) -> str:
    """Write the ``[[port]]`` table of a port as it stands in ``patch.toml``."""
    rows = [f"\n[[port]]\nbase = {_text(base)}\nera = {_text(era)}\n"]
    if requires:
        rows.append(f"requires = [{', '.join(map(_text, requires))}]\n")
    rows.append("markers = [\n")
    for marker in markers:
        parts = [f"file = {_text(marker.file)}"]
        if marker.has:
            parts.append(f"has = {_text(marker.has[0])}")
        if marker.exists is not None:
            parts.append(f"exists = {'true' if marker.exists else 'false'}")
        rows.append(f"  {{ {', '.join(parts)} }},\n")
    rows.append("]\n")
    return "".join(rows)


def _text(value: str) -> str:
    # for the characters that occur, a TOML string is written as in JSON
    return json.dumps(value, ensure_ascii=False)
