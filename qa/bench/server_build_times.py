"""Measure how long llama-server takes to build once the libraries of its release are built."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pyllamakv.source import verified
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench.commands import command
from qa.bench.figure import Figure

GROUP = "Building llama-server"
Tick = Callable[[], None]

#: Largest part of the CPU time of stock's server that the patched one may need after it.
SHARE = 0.5


def figures(tick: Tick) -> list[Figure]:
    """Measure the test release and the newest verified one."""
    names = dict.fromkeys((TEST_RELEASE, verified.newest().name))
    return [figure for name in names for figure in release_figures(tick, name)]


def release_figures(tick: Tick, release: str) -> list[Figure]:
    """Build the libraries of a release in an empty data directory, and then its servers."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        home = Path(folder)
        command(home, "upstream", "fetch", release)
        tick()
        _, stock_libraries = command(home, "build", release, "--stock")
        tick()
        _, patched_libraries = command(home, "build", release)
        tick()
        stock_wall, stock = command(home, "build", release, "--stock", "--server")
        tick()
        patched_wall, patched = command(home, "build", release, "--server")
        tick()
    libraries = stock_libraries + patched_libraries
    ratio, share = (stock + patched) / libraries, patched / stock
    return [
        Figure(
            GROUP,
            f"{release}: CPU, both servers over both libraries",
            f"{ratio:.2f} x, {stock + patched:.0f} s and {libraries:.0f} s",
            "<= 1 x",
            ratio <= 1,
            f"of the servers, stock's takes {stock:.0f} s, all of it in upstream's sources",
            f"no compiler cache; {stock_wall + patched_wall:.0f} s",
            {"servers": stock + patched, "libraries": libraries},
        ),
        Figure(
            GROUP,
            f"{release}: CPU, the patched server after stock's",
            f"{share:.2f} x, {patched:.0f} s and {stock:.0f} s",
            f"<= {SHARE} x",
            share <= SHARE,
            "",
            f"objects of stock are reused; {patched_wall:.0f} s and {stock_wall:.0f} s",
            {"patched": patched, "stock": stock},
        ),
    ]
