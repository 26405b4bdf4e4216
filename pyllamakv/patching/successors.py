"""Find the file that the code of a vanished file went to, by the lines and names of a patch."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.patching import telling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.patching.trees import StoreTree

_KINDS = (
    {".c", ".cc", ".cpp", ".h", ".hpp", ".m", ".mm"},
    {".cu", ".cuh"},
    {".metal"},
    {".py"},
)
#: Less likeness than this is chance: every C++ file shares some lines and names with another.
_LEAST = 0.2


class Successor(NamedTuple):
    """Name a file and how much of the searched lines and names it holds, 0 to 1."""

    path: str
    likeness: float


def find(tree: StoreTree, path: str, lines: Iterable[bytes]) -> tuple[Successor, ...]:
    """Return files that hold lines which stood in ``path`` once, the likeliest first.

    Lines count double, names that occur in them once; candidates lie in the same top folder and
    are of the same kind. At most three are returned; none where nothing is like it.
    """
    wanted = {telling.plain(line) for line in lines if telling.tells(line)}
    names = set(telling.names(line.encode() for line in wanted))
    if not wanted or not names:
        return ()
    top = path.split("/", 1)[0]
    near = _kinds(path)
    paths = [
        other
        for other in tree.modes
        if other != path and other.split("/", 1)[0] == top and PurePosixPath(other).suffix in near
    ]
    tree.fetch(paths)
    found = []
    for other in paths:
        entry = tree.entry(other)
        text = entry.data if entry else b""
        if not any(name.encode() in text for name in names):
            continue
        there = {telling.plain(line) for line in text.split(b"\n")}
        known = set(telling.names(text.split(b"\n")))
        same = len(wanted & there) / len(wanted)
        likeness = (2 * same + len(names & known) / len(names)) / 3
        if likeness >= _LEAST and same:
            found.append(Successor(other, round(likeness, 3)))
    return tuple(sorted(found, key=lambda s: (-s.likeness, s.path))[:3])


def _kinds(path: str) -> set[str]:
    suffix = PurePosixPath(path).suffix
    return next((kinds for kinds in _KINDS if suffix in kinds), {suffix})
