"""Follow the lines that each patch of a series adds into the tree that they all make."""

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
class Line:
    """Hold one line of the patched tree: its bytes, and the patch it is from (empty: upstream)."""

    data: bytes
    patch: str = ""


Files = Mapping[str, tuple[Line, ...]]


def follow(steps: Iterable[AppliedPort], stock: Tree) -> Files:
    """Return the files that the steps change, line by line, as they are after the last one."""
    files: dict[str, tuple[Line, ...]] = {}
    for step in steps:
        for file in step.text.patch.files:
            before: tuple[Line, ...] = ()
            if file.old is not None:
                before = files.pop(file.old, ()) or _upstream(stock, file.old)
            if file.new is not None:
                placed = [each for each in step.placements if each.file == file.path]
                files[file.new] = _changed(before, file, placed, step.text.id)
    return files


def _upstream(stock: Tree, path: str) -> tuple[Line, ...]:
    entry = stock.entry(path)
    return tuple(Line(data) for data in lines_of(entry.data)) if entry else ()


def _changed(
    before: tuple[Line, ...], file: FilePatch, placed: list[Placement], patch: str
) -> tuple[Line, ...]:
    out: list[Line] = []
    done = 0
    at = {each.hunk: each.at for each in placed}
    for number, hunk in enumerate(file.hunks, 1):
        start = 0 if file.old is None else at[number] - (1 if hunk.old_count else 0)
        out += before[done:start]
        done = start
        for line in hunk.lines:
            if line[:1] == b"+":
                out.append(Line(line[1:], patch))
            elif line[:1] != b"\\":
                if line[:1] != b"-":
                    out.append(before[done])
                done += 1
    return (*out, *before[done:])
