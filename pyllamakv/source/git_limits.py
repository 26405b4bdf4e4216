"""Limit memory, disk space and time of git while it unpacks untrusted data.

A few kilobytes of a pack can declare an object of gigabytes, or thousands of large objects that
differ in one byte. The maximum allocation is passed to git as configuration, which its child
processes inherit. The other limits are resource limits of the process. A Python process sets them
and then executes git, because a fork that runs Python code may hang in a program with threads.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.errors import GitError

#: The largest object, packed or loose: no file of a source tree comes near it.
MAX_OBJECT_BYTES = 256 << 20
#: Maximum address space of git while it unpacks: an object, its base, the delta, packs.
MAX_MEMORY_BYTES = 2 << 30
#: The largest pack: a release with its whole history has a third of this.
MAX_FILE_BYTES = 1 << 30
#: Processor time in seconds: a release takes a few of them.
MAX_CPU_SECONDS = 600
#: Timeout of git for local data. git waits forever for a pipe in the place of a file. The largest
#: tree or pack needs a few minutes on a slow disk.
MAX_SECONDS = 600.0
#: Timeout of git for a URL: a release takes minutes over a slow connection.
MAX_NETWORK_SECONDS = 1800.0
#: Options that end an HTTP connection which transfers less than 1000 bytes per second for a minute.
NETWORK_OPTIONS = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")

#: Stream large files; threads and whole packs would need more address space.
_SETTINGS = (
    "core.bigFileThreshold=64m",
    "core.packedGitWindowSize=16m",
    "core.packedGitLimit=256m",
    "pack.threads=1",
    # Keep small packs as packs: as separate files, objects could exceed the limit of one file.
    "fetch.unpackLimit=1",
)
_WORDS = ("over limit", "Out of memory", "Cannot allocate memory", "File too large")
#: git's message about a child process that exceeded the time limit.
_ENDED = f"died of signal {signal.SIGXCPU.value}"

_BECOME = """
import os, resource, sys
for name, text in zip(("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_CPU"), sys.argv[1:4]):
    wanted = int(text)
    what = getattr(resource, name)
    soft, hard = resource.getrlimit(what)
    if wanted and (soft == resource.RLIM_INFINITY or wanted < soft):
        try:
            resource.setrlimit(what, (wanted, hard))
        except (OSError, ValueError):
            pass  # not every system has every limit
os.execv(sys.argv[4], ["git", *sys.argv[5:]])
"""


def command(program: str, args: Sequence[str], *, memory: bool = True) -> list[str]:
    """Return the command that runs ``program``, the path of git, with ``args`` within the limits.

    Without ``memory``, the address space is unlimited: programs that git starts to reach a URL,
    such as credential helpers, may reserve more than they use.
    """
    settings = [word for each in _SETTINGS for word in ("-c", each)]
    limits = [str(MAX_MEMORY_BYTES if memory else 0), str(MAX_FILE_BYTES), str(MAX_CPU_SECONDS)]
    return [sys.executable, "-I", "-S", "-c", _BECOME, *limits, program, *settings, *args]


def environment() -> dict[str, str]:
    """Return the variables that limit a single allocation of git and its child processes."""
    return {"GIT_ALLOC_LIMIT": str(MAX_OBJECT_BYTES)}


def raise_if_limit_hit(error: GitError, what: str) -> None:
    """Raise ArchiveError if git failed because of a limit; ``what`` was unpacked."""
    if error.code == -signal.SIGXCPU or _ENDED in error.output:
        msg = (
            f"{what} takes more than {MAX_CPU_SECONDS} s of processor time to unpack; refused, "
            f"because no "
            "release needs that much"
        )
        raise ArchiveError(msg) from error
    if any(word in error.output for word in _WORDS):
        msg = (
            f"{what} takes more than {MAX_OBJECT_BYTES} bytes for an object, {MAX_MEMORY_BYTES} in "
            f"memory or {MAX_FILE_BYTES} in a file to unpack; no release needs that much; "
            "refused: "
            f"{error.output.strip()}"
        )
        raise ArchiveError(msg) from error
