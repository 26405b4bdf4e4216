"""Track the lines that each patch of a series adds in the patched tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.patching.hunk_locator import lines_of

if TYPE_CHECKING:
    from pyllamakv.patching.hunks import FilePatch
    from pyllamakv.patching.port_choice import AppliedPort
    from pyllamakv.patching.strict_apply import Placement, Tree


@dataclass(frozen=True)
class PatchedLine:
    """One line of the patched tree: its bytes, and its patch (empty: upstream)."""

    data: bytes
    patch: str = ""


Files = Mapping[str, tuple[PatchedLine, ...]]


def trace_lines(steps: Iterable[AppliedPort], stock: Tree) -> Files:
    """Return the changed files, line by line, as they are after the last patch."""
    files: dict[str, tuple[PatchedLine, ...]] = {}
    for step in steps:
        for file in step.port.patch.files:
            before: tuple[PatchedLine, ...] = ()
            if file.old is not None:
                before = files.pop(file.old, ()) or _upstream(stock, file.old)
            if file.new is not None:
                placed = [each for each in step.placements if each.file == file.path]
                files[file.new] = _changed(before, file, placed, step.port.id)
    return files


def _upstream(stock: Tree, path: str) -> tuple[PatchedLine, ...]:
    entry = stock.entry(path)
    return tuple(PatchedLine(data) for data in lines_of(entry.data)) if entry else ()


def _changed(
    before: tuple[PatchedLine, ...], file: FilePatch, placed: list[Placement], patch: str
) -> tuple[PatchedLine, ...]:
    out: list[PatchedLine] = []
    done = 0
    at = {each.hunk: each.at for each in placed}
    for number, hunk in enumerate(file.hunks, 1):
        start = 0 if file.old is None else at[number] - (1 if hunk.old_count else 0)
        out += before[done:start]
        done = start
        for line in hunk.lines:
            if line[:1] == b"+":
                out.append(PatchedLine(line[1:], patch))
            elif line[:1] != b"\\":
                if line[:1] != b"-":
                    out.append(before[done])
                done += 1
    return (*out, *before[done:])
