"""Measure the matrix of every release, with an empty data directory and again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyllamakv.home import home
from qa.bench.commands import command
from qa.bench.figure import Figure

GROUP = "The matrix of every release"
Tick = Callable[[], None]

#: Both statuses are measurements: a verdict that differs from the accepted one takes as long.
OK_STATUSES = (0, 1)


def figures(tick: Tick) -> list[Figure]:
    """Verify all releases with an empty data directory, and again with the results cached.

    The results of the first run are stored in ``home()/results/cold-matrix.json``, for ``pyllamakv
    matrix report --merge`` and ``accept --merge``.
    """
    kept = home() / "results" / "cold-matrix.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        fresh, result = Path(folder), Path(folder) / "cold.json"
        with result.open("w", encoding="utf-8") as output:
            cold, cpu = command(fresh, "matrix", "run", "--json", output=output, good=OK_STATUSES)
        tick()
        warm, _ = command(fresh, "matrix", "run", "--json", good=OK_STATUSES)
        tick()
        text = result.read_text(encoding="utf-8")
    kept.write_text(text, encoding="utf-8")
    cells: list[dict[str, Any]] = json.loads(text)["cells"]
    seconds = {cell["spec"]["release"]: float(cell["seconds"]) for cell in cells}
    slowest = max(seconds, key=lambda name: seconds[name])
    return [
        Figure(
            GROUP,
            f"`pyllamakv matrix run`, {len(cells)} releases, with an empty data directory",
            f"{cold / 60:.1f} min",
            "<= 100 min",
            cold <= 6000,
            f"total CPU time, mostly compilers: {cpu / 60:.0f} min",
            "no compiler cache; every release fetched, built stock and patched, and verified",
            {"wall": cold, "cpu": cpu},
        ),
        Figure(
            GROUP,
            "`pyllamakv matrix run` again",
            f"{warm:.1f} s",
            "<= 60 s",
            warm <= 60,
            "",
            "results come from the result cache",
            {"warm": warm},
        ),
        Figure(
            GROUP,
            "one release, fetched, built twice and verified",
            f"{min(seconds.values()):.0f} to {seconds[slowest]:.0f} s ({slowest})",
            "<= 480 s and its compile time",
            seconds[slowest] <= 480,
            "",
            "the cells of the first run",
            seconds,
        ),
    ]
