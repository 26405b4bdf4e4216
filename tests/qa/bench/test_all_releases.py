"""The benchmark of all releases reports the numbers of its two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from pyllamakv.home import home
from qa.bench import all_releases


def test_figures_are_those_of_the_cold_and_the_warm_run(monkeypatch, tmp_path: Path) -> None:
    """Both run in one home that is empty at first; the cold results are left behind."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    homes: list[Path] = []
    cells = [{"spec": {"release": name}, "seconds": n} for name, n in (("a", 10), ("b", 500))]

    def run(folder: Path, *_: str, output: IO[str] | None = None, good: tuple[int, ...]):
        assert good == (0, 1)
        homes.append(folder)
        if output is None:
            return 2.0, 1.0
        assert [each.name for each in folder.iterdir()] == ["cold.json"]
        output.write(json.dumps({"cells": cells}))
        return 600.0, 900.0

    monkeypatch.setattr(all_releases, "command", run)
    ticks: list[None] = []
    cold, warm, one = all_releases.figures(lambda: ticks.append(None))
    assert homes[0] == homes[1] != home()
    assert (cold.value, cold.met, warm.value, warm.met) == ("10.0 min", True, "2.0 s", True)
    assert (one.value, one.met) == ("10 to 500 s (b)", False)
    assert json.loads((home() / "results" / "cold-matrix.json").read_text()) == {"cells": cells}
    assert len(ticks) == 2
