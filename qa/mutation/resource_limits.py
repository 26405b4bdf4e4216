"""Limit the memory of mutated programs, and detect writes beyond their blocks."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import resource
import sys

#: Bytes of address space: several times those of the largest scenario.
MEMORY = 8 << 30


def bound(pid: int, *, memory: int | None = MEMORY, seconds: int | None = None) -> None:
    """Limit a process's address space and CPU time, if the system supports that.

    The CPU limit ends a hanging process even if its parent has ended.
    """
    if sys.platform != "linux":
        return
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: seconds}
    with contextlib.suppress(ProcessLookupError):
        for kind, most in limits.items():
            if most is not None:
                resource.prlimit(pid, kind, (most, most))


@functools.cache
def checked_heap() -> dict[str, str]:
    """Return the environment in which a block with an overrun aborts when it is freed.

    glibc has that in a separate library since 2.34; elsewhere nothing is checked.
    """
    library = ctypes.util.find_library("c_malloc_debug") if sys.platform == "linux" else None
    if library is None:
        return {}
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library, "MALLOC_CHECK_": "3"}
