"""Sample what this process holds while it does one thing over and over."""

from __future__ import annotations

import array
import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_SAMPLES: Final = 100
#: With fewer there is no line to draw: then it takes longer than it was given.
_FEWEST: Final = 8
_COLUMNS: Final = ("count", "heap", "resident", "maps", "fds", "threads")
_MALLOC: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Malloc(ctypes.Structure):
    """Hold what glibc's mallinfo2 returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC)


#: Libraries of this process that are open.
opened: Final[list[Any]] = []


def sample(count: int) -> dict[str, int]:
    """Return what this process has after ``count`` operations; sizes in bytes."""
    for library in opened:
        # Some thousand lines wait for a reader: until there are so many it would look like a leak.
        library.native.logs()
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    heap = 0
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Malloc
        found = libc.mallinfo2()
        heap = found.uordblks + found.hblkhd
    facts = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines()
    )
    return {
        "count": count,
        "heap": heap,
        "resident": int(facts["RssAnon"].split()[0]) * 1024,
        # Shared and file mappings are in none of the sizes.
        "maps": Path("/proc/self/maps").read_bytes().count(b"\n"),
        # Listing the folder takes one itself, each time.
        "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(facts["Threads"]),
    }


def run(work: Iterator[int], seconds: float, target: int) -> list[dict[str, int]]:
    """Work until the target or the time is reached; return the samples."""
    # Made beforehand: what is noted must not look like a leak.
    noted = array.array("q", bytes(8 * len(_COLUMNS) * (4 * _SAMPLES)))
    begin = looked = time.monotonic()
    count = sampled = rows = 0
    pause = 0.0
    for done in work:
        count += done
        now = time.monotonic()
        over = (now - begin >= seconds and rows >= _FEWEST) or count >= target
        due = now - looked >= max(pause, seconds / _SAMPLES)
        if due or count - sampled >= target / _SAMPLES or (over and count > sampled):
            for column, value in enumerate(sample(count).values()):
                noted[rows * len(_COLUMNS) + column] = value
            rows, sampled, looked = rows + 1, count, time.monotonic()
            # Looking takes a tenth of the time at most, where that leaves enough to look at.
            pause = min(10 * (looked - now), seconds / (2 * _FEWEST))
        if over:
            break
    work.close()  # type: ignore[attr-defined]
    width = len(_COLUMNS)
    return [
        dict(zip(_COLUMNS, noted[row * width : (row + 1) * width], strict=True))
        for row in range(rows)
    ]
