"""Ask ninja about a build: the commands of its library, and the dependencies of its objects."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pyllamakv.building import cmake
from pyllamakv.errors import Untestable


def commands(objects: Path) -> list[str]:
    """Return the commands that build the library; the last one links it."""
    return _asked(objects, "commands", "plk").splitlines()


def reads(objects: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files that each object depends on, as ninja recorded them."""
    found: dict[str, tuple[Path, ...]] = {}
    for block in _asked(objects, "deps").split("\n\n"):
        head, *lines = block.splitlines() or [""]
        paths = (os.path.normpath(objects / line.strip()) for line in lines)
        found[head.partition(": #deps")[0]] = tuple(Path(path) for path in paths)
    return found


def _asked(objects: Path, *words: str) -> str:
    done = subprocess.run(
        [str(cmake.binary("ninja")), "-t", *words],
        cwd=objects, capture_output=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        msg = f"ninja finds no build in {objects.name}: {done.stderr[-300:]}"
        raise Untestable(msg)
    return done.stdout
