"""Compile the fake library with the system's C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_plk.c")
ROOT = SOURCE.parents[3]

#: What decoding one of these tokens does; see fake_plk.c.
ABORT, THROW, MINUS, HANG, EXIT, SEGV, SLOW, LOG, FLOOD, FULL = range(500, 510)

_folder: tempfile.TemporaryDirectory[str] | None = None


def compiler() -> str:
    """Return the C compiler, or skip the test."""
    named = os.environ.get("CC", "").split() or ["cc"]
    for name in (named[0], "cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no C compiler on this machine")


@cache
def fake(*defines: str) -> Path:
    """Return the path of the fake library, compiled once per process and set of macros.

    Each has its own directory: ``<temporary>/<number>/libplk.so``.
    """
    global _folder
    tool = compiler()
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="fake-plk-")
    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    target = folder / "libplk.so"
    command = [tool, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror=implicit", "-shared"]
    command += ["-fPIC", *(f"-D{define}" for define in defines), "-I", ROOT / "pyllamakv/native"]
    done = subprocess.run(
        [*command, "-o", target, SOURCE],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stderr
    return target
