"""Keep programs that were made wrong from taking the machine's memory, or others' blocks of it."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import resource
import sys

#: Bytes of address space: several times what the largest scenario takes.
MEMORY = 8 << 30


def bound(pid: int, *, memory: int | None = MEMORY, seconds: int | None = None) -> None:
    """Bound a process's address space and its processor time, where the system has such limits.

    The time ends what hangs even if nobody is left to end it.
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
    """Return the environment in which a block that was written beyond its end aborts when freed.

    glibc has that in a library of its own since 2.34; elsewhere nothing is checked.
    """
    library = ctypes.util.find_library("c_malloc_debug") if sys.platform == "linux" else None
    if library is None:
        return {}
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library, "MALLOC_CHECK_": "3"}
