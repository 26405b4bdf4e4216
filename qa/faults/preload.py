"""Compile and configure the library that makes the n-th change of files fail (preload.c)."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pyllamakv.errors import ToolMissing

#: Changes, the process that stopped itself, and how often the fault happened (preload.c).
_SHARED = struct.Struct("<qqq")
_NAMES = ("PLF_ROOT", "PLF_SHARED", "PLF_AT", "PLF_DO", "PLF_GROUP", "PLF_CLOCK")


def compiled(folder: Path) -> Path:
    """Compile the library into a directory. Raises ToolMissing without a C compiler."""
    library, source = folder / "preload.so", Path(__file__).parent / "native" / "preload.c"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        hint = "install a C compiler, or name one in CC"
        raise ToolMissing(f"cannot start {compiler}: {error}; {hint}", "cc", hint) from error
    if done.returncode:
        hint = "use a compiler for this machine, with glibc's headers"
        raise ToolMissing(f"{source.name} does not compile: {done.stderr}; {hint}", "cc", hint)
    return library


def arm(words: Mapping[str, str]) -> None:
    """Read ``PLF_…`` variables for this process and its children; the library must be loaded."""
    for name in _NAMES:
        os.environ.pop(name, None)
    os.environ.update(words)
    ctypes.CDLL(None).plf_arm()


class Counter:
    """Own the file in which all processes of one attempt count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_SHARED.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SHARED.size)

    def reset(self) -> None:
        """Reset all counts to 0."""
        self._map[:] = bytes(_SHARED.size)

    @property
    def changes(self) -> int:
        """Return the number of changes."""
        return int(_SHARED.unpack(self._map[:])[0])

    @property
    def stopped(self) -> int:
        """Return the id of the process that stopped itself, 0 before."""
        return int(_SHARED.unpack(self._map[:])[1])

    @property
    def hits(self) -> int:
        """Return how often the fault happened, or a limit was reached."""
        return int(_SHARED.unpack(self._map[:])[2])
