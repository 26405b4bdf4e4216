"""Measure the memory limits of a defragmentation: the same moves in C, and memcpy."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllamakv.errors import NotEnoughMemory
from pyllamakv.runtime.snapshot import Moves
from qa.bench.defrag_workloads import CacheShape
from qa.bench.measure import clock

Table = NDArray[np.uint32]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("layers", "cells", "k", "v", "rows")]


class MemoryBandwidth:
    """A block of memory with the layout of a cache; all pages are resident."""

    def __init__(self, library: ctypes.CDLL, cache: CacheShape) -> None:
        self._library = library
        rows = cache.width if cache.transposed else 1
        self._shape = _Shape(cache.layers, cache.cells, cache.row, cache.row // rows, rows)
        library.limits_new.restype = ctypes.c_void_p
        self._block = ctypes.c_void_p(library.limits_new(ctypes.byref(self._shape)))
        if not self._block:
            msg = f"no memory for a block of {cache.bytes} bytes beside the cache"
            raise NotEnoughMemory(msg, needed=cache.bytes, available=0)

    def strided(self, table: Table) -> float:
        """Return the seconds of the moves, each row copied at the cache's strides."""
        moves = ctypes.c_void_p(table.ctypes.data)
        return self._time(self._library.limits_strided, moves, ctypes.c_uint64(len(table)))

    def straight(self, size: int) -> float:
        """Return the seconds of one copy of ``n`` bytes."""
        return self._time(self._library.limits_straight, ctypes.c_uint64(size))

    def _time(self, function: Any, *args: Any) -> float:
        return clock(lambda: function(self._block, ctypes.byref(self._shape), *args))

    def __enter__(self) -> MemoryBandwidth:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._library.limits_free(self._block)


def table(moves: Moves) -> Table:
    """Return moves as runs of adjacent cells: source, target and length, (runs, 3)."""
    source, target = moves.source, moves.target
    breaks = np.ones(len(source), dtype=np.bool_)
    breaks[1:] = (np.diff(source) != 1) | (np.diff(target) != 1)
    first = np.flatnonzero(breaks)
    length = np.diff(np.append(first, len(source)))
    return np.ascontiguousarray(
        np.column_stack((source[first], target[first], length)), dtype=np.uint32
    )
