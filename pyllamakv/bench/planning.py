"""Time the plan of a defragmentation by itself, out of the header that the patch brings."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np

from pyllamakv.bench import compiled
from pyllamakv.bench.measure import clock
from pyllamakv.bench.workloads import Live
from pyllamakv.errors import Untestable
from pyllamakv.home import data
from pyllamakv.patching import hunks

HEADER = "src/llama-kv-defrag.h"


class Planner:
    """Plan moves as the patch does; the header is compiled when it is first needed."""

    def __call__(self, mask: Live) -> float:
        """Return the seconds of a plan for these live cells."""
        used = np.ascontiguousarray(mask, dtype=np.uint8)
        place, size = ctypes.c_void_p(used.ctypes.data), ctypes.c_uint32(len(used))
        return clock(lambda: self._library.plan_moves(place, size))

    @cached_property
    def _library(self) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
            (Path(folder) / Path(HEADER).name).write_bytes(header())
            return compiled.load("plan.cpp", Path(folder), include=Path(folder))


def header() -> bytes:
    """Return the header as a patch adds it; it is the same in all texts that have it."""
    for path in sorted(data("patches").glob("*/*/*.patch")):
        for part in hunks.read(path).files:
            if part.path == HEADER and part.old is None:
                return b"".join(line for hunk in part.hunks for line in hunk.added)
    msg = f"no patch of this series adds {HEADER}"
    raise Untestable(msg)
