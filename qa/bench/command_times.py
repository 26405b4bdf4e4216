"""Measure complete commands in a new data directory: the check, cold and warm, and both builds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pyllamakv.source.releases import TEST_RELEASE
from qa.bench.commands import command
from qa.bench.figure import Figure

GROUP = "Whole commands"
Tick = Callable[[], None]


def figures(tick: Tick, release: str = TEST_RELEASE) -> list[Figure]:
    """Build and check a release with an empty data directory, then check it again."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        home = Path(folder)
        fetch, _ = command(home, "upstream", "fetch", release)
        tick()
        stock, stock_cpu = command(home, "build", release, "--stock")
        tick()
        patched, patched_cpu = command(home, "build", release)
        tick()
        cold, _ = command(home, "check", release)
        tick()
        warm, _ = command(home, "check", release)
        tick()
    whole = fetch + stock + patched + cold
    share = patched_cpu / stock_cpu
    return [
        Figure(
            GROUP,
            f"`pyllamakv check {release}` with an empty data directory",
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
            "results come from the result cache",
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
