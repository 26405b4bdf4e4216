"""Measure whole commands in a home of their own: the check, cold and warm, and both builds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyllamakv.bench.figure import Figure
from pyllamakv.bench.measure import clock
from pyllamakv.source.releases import DEFAULT

GROUP = "Whole commands"
Tick = Callable[[], None]


def _command(home: Path, *words: str) -> tuple[float, float]:
    """Run a verb and return its seconds of wall time and of CPU, children included."""
    # A compiler cache would make the second measurement of a machine another one.
    environment = dict(os.environ, PYLLAMAKV_HOME=str(home), CCACHE_DISABLE="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = clock(
        lambda: subprocess.run(
            [sys.executable, "-m", "pyllamakv", *words],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(tick: Tick, release: str = DEFAULT) -> list[Figure]:
    """Build and check a release from an empty home, then check it again."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        home = Path(folder)
        fetch, _ = _command(home, "upstream", "fetch", release)
        tick()
        stock, stock_cpu = _command(home, "build", release, "--stock")
        tick()
        patched, patched_cpu = _command(home, "build", release)
        tick()
        cold, _ = _command(home, "check", release)
        tick()
        warm, _ = _command(home, "check", release)
        tick()
    whole = fetch + stock + patched + cold
    share = patched_cpu / stock_cpu
    return [
        Figure(
            GROUP,
            f"`pyllamakv check {release}` from an empty home",
            f"{whole:.0f} s (fetch {fetch:.0f}, stock {stock:.0f}, patched {patched:.0f}, "
            f"runs {cold:.0f})",
            "<= 360 s",
            whole <= 360,
            f"compiling: {stock_cpu + patched_cpu:.0f} s of CPU",
            "no compiler cache; the set-up of Python's packages is not in it",
            {"fetch": fetch, "stock": stock, "patched": patched, "check": cold},
        ),
        Figure(
            GROUP,
            f"`pyllamakv check {release}` again",
            f"{warm:.1f} s",
            "<= 30 s",
            warm <= 30,
            "",
            "results are kept by content",
            {"warm": warm},
        ),
        Figure(
            GROUP,
            "patched build after stock",
            f"{share:.0%} of stock's CPU",
            "<= 30 %",
            share <= 0.30,
            "the files that include a patched header",
            f"{patched_cpu:.0f} s after {stock_cpu:.0f} s of CPU, no compiler cache",
            {"stock": stock_cpu, "patched": patched_cpu},
        ),
    ]
