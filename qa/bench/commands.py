"""Run whole commands in a home of their own, and take their time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import IO

from qa.bench.measure import clock


def command(
    home: Path, *words: str, output: IO[str] | None = None, good: tuple[int, ...] = (0,)
) -> tuple[float, float]:
    """Run a verb and return its seconds of wall time and of CPU, children included.

    Raises CalledProcessError when it ends with another status than the ``good`` ones.
    """
    # A compiler cache would make the second measurement of a machine another one.
    environment = dict(os.environ, PYLLAMAKV_HOME=str(home), CCACHE_DISABLE="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pyllamakv", *words],
            env=environment,
            check=False,
            stdout=output or subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode not in good:
            done.check_returncode()

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = clock(run)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
