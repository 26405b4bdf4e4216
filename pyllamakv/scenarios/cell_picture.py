"""Describe the cells of a cache at one moment by their owners, as pictures and traces keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.printable import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.snapshot import CellMap, Snapshot

#: Owner of a free cell, and of one that several sequences share.
FREE, SHARED = -1, -2


def owners(cells: CellMap) -> NDArray[np.int64]:
    """Return the owner of each cell: its sequence, `FREE` or `SHARED`."""
    lone = np.full(len(cells.pos), FREE, dtype=np.int64)
    for sequence in np.flatnonzero(cells.counts).tolist():
        lone[cells.has(sequence)] = sequence
    lone[cells.sharers > 1] = SHARED
    lone[~cells.used] = FREE
    return lone


@dataclass(frozen=True)
class Picture:
    """The cells of a cache at one moment: per cell its owner, `FREE` or `SHARED`.

    ``streams`` are the lengths of the concatenated streams, empty for one stream.
    """

    label: str
    owner: tuple[int, ...]
    streams: tuple[int, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, label: str = "") -> Picture:
        """Create a picture of a snapshot, with its streams concatenated."""
        found = [owner for cells in snapshot.streams for owner in owners(cells).tolist()]
        streams = tuple(len(cells.pos) for cells in snapshot.streams)
        return cls(label, tuple(found), streams if len(streams) > 1 else ())

    @cached_property
    def used(self) -> int:
        """Count the used cells."""
        return sum(owner != FREE for owner in self.owner)

    @cached_property
    def holes(self) -> tuple[int, int]:
        """Return how many holes there are, and the largest."""
        free = [length for owner, length in self.runs() if owner == FREE]
        return len(free), max(free, default=0)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first cell of every stream but the first."""
        return tuple(np.cumsum(self.streams[:-1]).tolist()) if self.streams else ()

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, length) of each run of cells with one owner, inside one stream."""
        edges = [0, *self.starts, len(self.owner)]
        for start, end in pairwise(edges):
            for owner, run in groupby(self.owner[start:end]):
                yield owner, len(list(run))

    def to_json(self) -> dict[str, Any]:
        """Return the picture as plain JSON values, run by run."""
        streams = {"streams": list(self.streams)} if self.streams else {}
        return {"label": self.label, "runs": [list(run) for run in self.runs()], **streams}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Picture:
        """Return the picture that `to_json` described."""
        owners = [int(owner) for owner, length in raw["runs"] for _ in range(int(length))]
        streams = tuple(int(length) for length in raw.get("streams", ()))
        return cls(str(raw["label"]), tuple(owners), streams)

    def caption(self) -> str:
        """Return label and numbers in one line."""
        numbers = self.numbers()
        return f"{printable(self.label)}: {numbers}" if self.label else numbers

    def numbers(self) -> str:
        """Return the statistics of the cells in words."""
        holes, largest = self.holes
        plural = "hole" if holes == 1 else "holes"
        return f"{self.used} of {len(self.owner)} cells used, {holes} {plural}, largest {largest}"

    def scaled(self, places: int) -> tuple[int, list[int]]:
        """Return how many cells share a place, and the owner of each of at most ``places``.

        A place shows its most frequent owner, and is free only when all of its cells are.
        """
        step = max(1, -(-len(self.owner) // places))
        if step == 1:
            return 1, list(self.owner)
        return step, [
            most_frequent(self.owner[start : start + step])
            for start in range(0, len(self.owner), step)
        ]


def shares(owners: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return (owner, share of the cells), sequences first, then shared and free cells."""
    counts = Counter(owners)
    ordered = sorted(counts, key=lambda owner: (owner == FREE, owner == SHARED, owner))
    return tuple((owner, counts[owner] / len(owners)) for owner in ordered)


def most_frequent(owners: Sequence[int]) -> int:
    """Return the owner that a place of several cells shows."""
    part = [owner for owner in owners if owner != FREE]
    return max(sorted(set(part)), key=part.count) if part else FREE
