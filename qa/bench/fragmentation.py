"""Create fragmented caches of any size in the time of copying their content.

A few tokens are decoded once and saved. That state is restored repeatedly, each time with different
positions, and joined to one sequence: cells to remove have the low positions, cells to keep the
high ones, so that one removal creates any pattern.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pyllamakv.errors import Untestable
from pyllamakv.runtime.context import Context
from qa.bench.defrag_workloads import Live

#: Number of decoded cells, and of cells in the restored state.
DECODED, PIECE = 256, 2048

#: The sequence that owns all cells, and the one that is restored into.
ALL, NEXT = 0, 1


class Fragmenter:
    """Create patterns in the cache of a context that is otherwise unused; it has two sequences."""

    def __init__(self, context: Context) -> None:
        self.native, self.handle = context.native, context.handle
        self.cells = context.info.n_ctx
        decoded = min(DECODED, self.cells)
        self._decode(decoded, context.info.n_batch)
        self._take(decoded)
        self._fill(np.arange(min(PIECE, self.cells)))
        self._take(min(PIECE, self.cells))

    def fragment(self, mask: Live) -> None:
        """Leave exactly the cells of ``mask`` (cells,) in use, in sequence ``ALL``."""
        gone = int(np.count_nonzero(~mask))
        positions = np.where(mask, self.cells + np.cumsum(mask), np.cumsum(~mask) - 1)
        self._fill(positions)
        self.native.seq_rm(self.handle, ALL, 0, gone)

    def _decode(self, n: int, batch: int) -> None:
        for start in range(0, n, batch):
            pos = np.arange(start, min(start + batch, n), dtype=np.int32)
            seq = np.full(len(pos), ALL, dtype=np.int32)
            code = self.native.decode(self.handle, pos % 32, pos, None, seq, None)
            if code:
                msg = f"the cells to restore could not be decoded: {code}"
                raise Untestable(msg)

    def _take(self, n: int) -> None:
        self._raw = bytearray(self.native.state_save(self.handle, ALL))
        self._places = _places(self._raw, n)

    def _fill(self, positions: NDArray[Any]) -> None:
        native, handle, step = self.native, self.handle, len(self._places)
        native.seq_rm(handle, -1, -1, -1)
        for start in range(0, len(positions), step):
            self._places[:] = positions[start : start + step]
            target = NEXT if start else ALL
            # C accepts any buffer, and this one is too large to copy each time.
            if native.state_load(handle, target, cast("bytes", self._raw)) != len(self._raw):
                msg = f"the library refused to restore cells {start}..{start + step}"
                raise Untestable(msg)
            if start:
                native.seq_cp(handle, NEXT, ALL, -1, -1)
                native.seq_rm(handle, NEXT, -1, -1)


def _places(raw: bytearray, n: int) -> NDArray[np.int32]:
    """Return a view of the positions in a state of ``n`` tokens at 0, 1, 2 and so on.

    Releases differ in the bytes before the cells and in the fields next to each position.
    """
    words = np.frombuffer(raw, dtype="<i4", count=min(len(raw) // 4, 16 + 8 * n))
    wanted = np.arange(n)
    for start in range(16):
        for width in range(1, 9):
            places = words[start : start + n * width : width]
            if len(places) == n and np.array_equal(places, wanted):
                return places
    msg = "this release writes sequence states in a way that is not known here"
    raise Untestable(msg)
