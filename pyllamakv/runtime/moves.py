"""Find where cells went between two moments of a cache, from their positions and sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Moves:
    """Hold the cells that moved, ordered by source: ``stream``, ``source`` and ``target`` (n,).

    ``vanished`` and ``appeared`` count used cells of one side that the other side lacks.
    """

    stream: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    vanished: int = 0
    appeared: int = 0

    @staticmethod
    def join(parts: Sequence[Moves]) -> Moves:
        """Put the moves of several streams together."""
        for part in arguments.items("parts", parts, "a list of Moves"):
            arguments.instance("an item of parts", part, Moves, "Moves")
        stream = [np.full(len(part), i, dtype=np.int64) for i, part in enumerate(parts)]
        empty = np.empty(0, dtype=np.int64)
        return Moves(
            np.concatenate([empty, *stream]),
            np.concatenate([empty, *(part.source for part in parts)]),
            np.concatenate([empty, *(part.target for part in parts)]),
            sum(part.vanished for part in parts),
            sum(part.appeared for part in parts),
        )

    @property
    def cells(self) -> int:
        """Return how many cells moved."""
        return len(self.source)

    @property
    def runs(self) -> int:
        """Return how many copies of neighbouring cells the moves amount to."""
        if not len(self):
            return 0
        same = np.diff(self.stream) == 0
        steps = same & (np.diff(self.source) == 1) & (np.diff(self.target) == 1)
        return len(self) - int(np.count_nonzero(steps))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Return (old cell, new cell) pairs, (n, 2)."""
        return np.column_stack((self.source, self.target))

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self.source.tolist(), self.target.tolist(), strict=True))

    def __str__(self) -> str:
        lost = f", {self.vanished} vanished" if self.vanished else ""
        new = f", {self.appeared} appeared" if self.appeared else ""
        return f"{self.cells} cells moved in {self.runs} runs{lost}{new}"


def find_moves(
    old_pos: NDArray[np.int32],
    old_seqs: NDArray[np.uint64],
    new_pos: NDArray[np.int32],
    new_seqs: NDArray[np.uint64],
) -> Moves:
    """Pair old with new cells of one stream.

    A cell that holds the same position and sequences as before has not moved. Where several of
    the others are alike, the first goes with the first.
    """
    same = (old_pos == new_pos) & (old_seqs == new_seqs).all(axis=1)
    old = np.flatnonzero((old_pos >= 0) & ~same)
    new = np.flatnonzero((new_pos >= 0) & ~same)
    pos, seqs = ((old_pos[old], new_pos[new]), (old_seqs[old], new_seqs[new]))
    kinds = _kinds(np.concatenate(pos), np.concatenate(seqs))
    old_keys, new_keys = _numbered(kinds[: len(old)]), _numbered(kinds[len(old) :])
    _, left, right = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
    source, target = old[left], new[right]
    order = np.argsort(source, kind="stable")
    lost, new_ones = len(old) - len(order), len(new) - len(order)
    stream = np.zeros(len(order), dtype=np.int64)
    return Moves(stream, source[order], target[order], lost, new_ones)


def _kinds(pos: NDArray[np.int32], seqs: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Give each distinct (position, sequences) a number."""
    order = np.lexsort((*seqs.T, pos))
    changed = (np.diff(pos[order]) != 0) | (np.diff(seqs[order], axis=0) != 0).any(axis=1)
    numbers = np.empty(len(pos), dtype=np.int64)
    numbers[order] = np.concatenate(([0], np.cumsum(changed)))[: len(pos)]
    return numbers


def _numbered(kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Make equal kinds distinct by how often they came before, so that first pairs with first."""
    order = np.argsort(kinds, kind="stable")
    ordered = kinds[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(np.append(starts, len(ordered)))
    occurrence = np.arange(len(ordered)) - np.repeat(starts, lengths)
    numbers = np.empty(len(kinds), dtype=np.int64)
    # Both sides are shorter than 2**31, so this is one number per (kind, occurrence).
    numbers[order] = (ordered << 32) | occurrence
    return numbers
