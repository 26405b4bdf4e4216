"""Keep programs that were made wrong from taking the machine's memory."""

from __future__ import annotations

import contextlib
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
