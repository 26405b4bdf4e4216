"""Count the CPUs that this process may use, and those that others leave to it."""

from __future__ import annotations

import os
from pathlib import Path

#: Where control groups are mounted, and the file with the groups of this process.
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
#: The load of the machine: the fourth field starts with the number of runnable threads.
_LOAD = Path("/proc/loadavg")


def usable_cpus() -> int:
    """Return the number of CPUs of this process: its affinity, limited by control groups (v2)."""
    affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cpus, quota(_OWN, _GROUPS) or cpus))


def free_cpus(most: int) -> int:
    """Return how many CPUs no other thread runs on or waits for now: 1 to ``most``.

    Threads of one computation wait for each other hundreds of times per token, and ggml's spin
    meanwhile. If two of them share a CPU with each other or with another process, one spins while
    the other cannot run, for a time slice of the system each time.
    """
    try:
        running, _, _ = _LOAD.read_text(encoding="ascii").split()[3].partition("/")
        others = int(running) - 1  # this thread runs as well
    except (OSError, ValueError, IndexError):  # not Linux
        others = 0
    return max(1, min(most, (os.cpu_count() or 1) - others))


def quota(own: Path, groups: Path) -> int | None:
    """Return the smallest CPU quota of a group and those above it, rounded up; None without any.

    ``own`` has the format of ``/proc/self/cgroup``, and ``groups`` is the mounted hierarchy.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return None
    group = groups / name.strip("/")
    found = []
    for each in (group, *group.parents):
        try:
            most, period = (each / "cpu.max").read_text(encoding="ascii").split()
            found.append(-(-int(most) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            pass
        if each == groups:
            break
    return min(found, default=None)
