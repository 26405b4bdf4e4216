"""Run complete commands in a new data directory, and measure their time."""

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
    """Run a CLI verb and return its wall and CPU seconds, including children.

    Raises CalledProcessError if its exit status is not in ``good``.
    """
    # A compiler cache would change the second measurement on a machine.
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
