"""Every fetched state counts as unseen, in two ways; what needs a person is not a success."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, code
from typer.testing import CliRunner

from pyllamakv.patching import series
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store
from qa import upkeep

if TYPE_CHECKING:
    from pathlib import Path

ONE = {"src/a.cpp": code("first") + code("second"), "src/b.cpp": b"int b;\n"}
PATCHED = ONE | {"src/a.cpp": code("first", "fix(a);") + code("second")}
#: The patch merges here.
TWO = ONE | {"src/a.cpp": ONE["src/a.cpp"].replace(b"first_7();", b"first_7(a);")}
#: Upstream changed the lines that the patch changes; a port of its own.
THREE = ONE | {"src/a.cpp": code("first", "other(b);") + code("second")}
PORTED = ONE | {"src/a.cpp": code("first", "other(b);", "fix(a);") + code("second")}
#: The port for the release before applies.
FOUR = THREE | {"src/b.cpp": b"int c;\n"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return four releases, of which two have ports."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    for day, (name, files) in enumerate(
        {"0.3.1": ONE, "0.3.2": TWO, "0.3.3": THREE, "0.3.4": FOUR}.items(), 1
    ):
        bench.add_release(name, files, f"2026-08-0{day}")
    bench.add_patch("fix", {"0.3.1": (ONE, PATCHED), "0.3.3": (THREE, PORTED)},
                    marker=("src/a.cpp", "first_8"))  # fmt: skip
    loaded = series.load(bench.folder)
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    monkeypatch.setattr(series, "load", lambda: loaded)
    return bench


def test_both_ways(bench: SeriesSandbox, tmp_path: Path) -> None:
    """Own ports are removed, newer ones as well; the page counts both."""
    made = CliRunner().invoke(upkeep.app, ["--write", str(tmp_path / "upkeep.md"), "--json"])
    assert made.exit_code == 0, made.output
    rows = json.loads(made.stdout)
    found = {(row["release"], row["mode"]): row["patches"].get("fix") for row in rows}
    assert found == {
        ("0.3.1", "leave-one-out"): "manual",
        ("0.3.1", "forward"): "manual",
        ("0.3.2", "leave-one-out"): "carried 0.3.1",
        ("0.3.2", "forward"): "carried 0.3.1",
        ("0.3.3", "leave-one-out"): "manual",
        ("0.3.3", "forward"): "manual",
        ("0.3.4", "leave-one-out"): "strict",
        ("0.3.4", "forward"): "strict",
    }
    page = (tmp_path / "upkeep.md").read_text("utf-8")
    assert "| all | leave one out | 4 | 1 | 1 | 2 | 50.0 % | 98 % |" in page
    assert "| after July 2026 | forward | 4 | 1 | 1 | 2 | 50.0 % | 90 % |" in page
    assert "| 0.3.3 | 2026-08-03 | forward | fix |" in page


def test_an_interrupted_measurement_continues(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is read again; a changed port is measured again."""
    measured: list[str] = []
    plain = upkeep.measure

    def counted(release, mode, *rest):
        measured.append(f"{mode} {release.name}")
        return plain(release, mode, *rest)

    monkeypatch.setattr(upkeep, "measure", counted)
    quiet = lambda *_: None  # noqa: E731
    assert len(upkeep.measure_all(quiet, limit=3)) == 3
    assert len(upkeep.measure_all(quiet)) == 8
    assert len(measured) == len(set(measured)) == 8
    upkeep.measure_all(quiet)
    assert len(measured) == 8


def test_equal_trees_count_once(bench: SeriesSandbox) -> None:
    """Two indexes may have the same state of llama.cpp."""
    bench.add_release("b100", TWO, "2026-08-02")
    assert [release.name for release in upkeep.states(bench.store)].count("b100") == 0
