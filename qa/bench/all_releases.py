"""Measure the matrix of every release, from an empty home and again."""

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

#: Both are measurements: what is judged worse than accepted takes its time as well.
OK_STATUSES = (0, 1)


def figures(tick: Tick) -> list[Figure]:
    """Judge all releases from an empty home, then again.

    The results of the first run are left in ``home()/results/cold-matrix.json``, where
    ``pyllamakv matrix report --merge`` and ``accept --merge`` take them.
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
            f"`pyllamakv matrix run`, {len(cells)} releases, from an empty home",
            f"{cold / 60:.1f} min",
            "<= 100 min",
            cold <= 6000,
            f"CPU of it all, compilers first: {cpu / 60:.0f} min",
            "no compiler cache; every release fetched, built stock and patched, and judged",
            {"wall": cold, "cpu": cpu},
        ),
        Figure(
            GROUP,
            "`pyllamakv matrix run` again",
            f"{warm:.1f} s",
            "<= 60 s",
            warm <= 60,
            "",
            "results are kept by content",
            {"warm": warm},
        ),
        Figure(
            GROUP,
            "one release, fetched, built twice and judged",
            f"{min(seconds.values()):.0f} to {seconds[slowest]:.0f} s ({slowest})",
            "<= 480 s and its compile time",
            seconds[slowest] <= 480,
            "",
            "the cells of the first run",
            seconds,
        ),
    ]
