"""Sample the cells of a context, and evaluate the samples later.

A sample costs a copy of a few arrays. Statistics, pictures and moves cost more, and are computed
when the sample is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding.protocol import Capability
from pyllamakv.runtime.snapshot import CellMap, Snapshot
from pyllamakv.scenarios.cell_picture import owners

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle, ContextInfo, Native

#: Statistics of the cells that are stored in a trace.
COUNTS = ("used", "holes", "largest_hole")


@dataclass(frozen=True, eq=False)
class CellSample:
    """The cells of a context at one moment."""

    snapshot: Snapshot

    @property
    def bytes(self) -> int:
        """Return the memory of the sample in bytes."""
        return sum(each.pos.nbytes * 2 + each.seqs.nbytes for each in self.snapshot.streams)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return used cells, holes and the largest hole."""
        stats = self.snapshot.stats
        return {name: int(getattr(stats, name)) for name in COUNTS}

    @cached_property
    def free(self) -> int:
        """Return the free cells of the cache or stream that has fewest."""
        streams = self.snapshot.streams
        return min(len(each.pos) - int(np.count_nonzero(each.used)) for each in streams)

    @cached_property
    def hole(self) -> int:
        """Return the largest hole of the cache or stream whose largest is smallest."""
        return min(int(each.holes[:, 1].max(initial=0)) for each in self.snapshot.streams)

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """Return the owner of each cell, with its streams concatenated, as in `Picture`."""
        return np.concatenate([owners(each) for each in self.snapshot.streams])

    def runs(self) -> list[list[int]]:
        """Return [owner, length] of each run of cells with one owner."""
        owner = self.owner
        starts = np.flatnonzero(np.diff(owner, prepend=owner[0] - 1))
        lengths = np.diff(np.append(starts, len(owner)))
        found: list[list[int]] = np.column_stack((owner[starts], lengths)).tolist()
        return found

    def moved(self, before: CellSample) -> list[list[int]]:
        """Return [from, to, length] of each run of cells that moved since ``before``.

        Cell numbers continue across streams, as in `runs`.
        """
        moves = before.snapshot.moves_to(self.snapshot)
        if not len(moves):
            return []
        starts = np.cumsum([0, *(len(each) for each in self.snapshot.streams)])[moves.stream]
        pairs = np.column_stack((moves.source + starts, moves.target + starts))
        first = np.flatnonzero(np.any(np.diff(pairs, axis=0, prepend=pairs[:1] - 2) != 1, axis=1))
        lengths = np.diff(np.append(first, len(pairs)))
        found: list[list[int]] = np.column_stack((pairs[first], lengths)).tolist()
        return found


def sample_cells(native: Native, context: ContextHandle, info: ContextInfo) -> CellSample | None:
    """Sample the cells; None if the build cannot read them or has none."""
    if Capability.CELLS not in native.about.capabilities or not info.n_caches:
        return None
    raw = [native.cells(context, cache) for cache in range(info.n_caches)]
    streams = tuple(CellMap(each.pos, each.shift, each.seqs, each.info) for each in raw)
    return CellSample(Snapshot(streams, info.contiguous_slots))


def top_token(row: NDArray[np.float32]) -> list[Any]:
    """Return the most likely token, its logit, and the margin to the second."""
    token = int(row.argmax())
    top = float(row[token])
    second = float(np.partition(row, -2)[-2]) if len(row) > 1 else top
    return [token, round(top, 4), round(top - second, 4)]
