"""Compile the C files in ``bench/native`` that benchmarks compare with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from pyllamakv.errors import Untestable

_COMPILERS = ("cc", "gcc", "clang")


def load(name: str, folder: Path) -> ctypes.CDLL:
    """Compile ``bench/native/NAME`` into ``folder`` and load it.

    Raises Untestable if there is no compiler or the file does not compile.
    """
    source = Path(__file__).parent / "native" / name
    found = [path for each in _COMPILERS if (path := shutil.which(each))]
    if not found:
        msg = f"no compiler for {name}: install gcc or clang"
        raise Untestable(msg)
    library = folder / f"{source.stem}.so"
    command = [found[0], "-O3", "-shared", "-fPIC", str(source)]
    command += ["-o", str(library)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        msg = f"{name} does not compile: {done.stderr.strip()}"
        raise Untestable(msg)
    return ctypes.CDLL(str(library))
