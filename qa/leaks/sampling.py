"""Sample the resources of this process while it repeats an operation."""

from __future__ import annotations

import array
import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_SAMPLES: Final = 100
#: Minimum number of samples for a line; they may exceed the time limit.
_FEWEST: Final = 8
_COLUMNS: Final = ("count", "heap", "resident", "maps", "fds", "threads")
_MALLOC: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Malloc(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC)


#: Open libraries of this process.
opened: Final[list[Any]] = []


def sample(count: int) -> dict[str, int]:
    """Return the resources of this process after ``count`` operations; sizes in bytes."""
    for library in opened:
        # The log buffer holds some thousand lines; until it is full, its growth would look like a
        # leak.
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
        # Listing the directory opens one descriptor itself.
        "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(facts["Threads"]),
    }


def run(work: Iterator[int], seconds: float, target: int) -> list[dict[str, int]]:
    """Run until the target or the time is reached; return the samples."""
    # Allocated before, so that the samples themselves do not look like a leak.
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
            # Sampling takes a tenth of the time at most, if that leaves enough samples.
            pause = min(10 * (looked - now), seconds / (2 * _FEWEST))
        if over:
            break
    work.close()  # type: ignore[attr-defined]
    width = len(_COLUMNS)
    return [
        dict(zip(_COLUMNS, noted[row * width : (row + 1) * width], strict=True))
        for row in range(rows)
    ]
