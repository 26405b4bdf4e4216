"""Find the file that the code of a vanished file went to, by the lines and names of a patch."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.patching import cpp_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.patching.trees import StoreTree

_KINDS = (
    {".c", ".cc", ".cpp", ".h", ".hpp", ".m", ".mm"},
    {".cu", ".cuh"},
    {".metal"},
    {".py"},
)
#: Minimum similarity: any two C++ files share some lines and names.
_LEAST = 0.2


class Successor(NamedTuple):
    """Name a file and how much of the searched lines and names it holds, 0 to 1."""

    path: str
    similarity: float


def find(tree: StoreTree, path: str, lines: Iterable[bytes]) -> tuple[Successor, ...]:
    """Return files with lines that were in ``path``, the most likely first.

    Searches files of the same type in the same top directory. A line or name has less weight if
    more files contain it. Returns at most three files, and none if no file is more similar than
    ``path`` itself.
    """
    old = [line for line in lines if cpp_lines.is_significant(line)]
    wanted = {cpp_lines.normalize(line) for line in old} | set(cpp_lines.names(old))
    top = path.split("/", 1)[0]
    near = _kinds(path)
    paths = [
        other
        for other in tree.modes
        if other.split("/", 1)[0] == top and PurePosixPath(other).suffix in near
    ]
    tree.fetch(paths)
    held: dict[str, set[str]] = {}
    for other in paths:
        entry = tree.entry(other)
        held[other] = wanted & _parts(entry.data) if entry else set()
    seen = Counter(part for parts in held.values() for part in parts)
    weights = {part: 1 / max(seen[part], 1) for part in wanted}
    whole = sum(weights.values()) or 1.0
    found = [
        Successor(other, round(sum(weights[part] for part in parts) / whole, 3))
        for other, parts in held.items()
    ]
    ranked = sorted(found, key=lambda s: (-s.similarity, s.path))
    best = ranked[0].similarity if ranked else 0.0
    kept = [s for s in ranked if s.similarity >= max(_LEAST, best / 2)]
    if path in [s.path for s in kept[:1]]:
        return ()
    return tuple(s for s in kept if s.path != path)[:3]


@functools.lru_cache(maxsize=1024)
def _parts(data: bytes) -> frozenset[str]:
    lines = data.split(b"\n")
    return frozenset({*map(cpp_lines.normalize, lines), *cpp_lines.names(lines)})


def _kinds(path: str) -> set[str]:
    suffix = PurePosixPath(path).suffix
    return next((kinds for kinds in _KINDS if suffix in kinds), {suffix})
