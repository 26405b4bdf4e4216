"""Test the search for the newest release of a series, and for the first failure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import cell_results
from patching_kit import SeriesSandbox, code

from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store
from pyllamakv.verification import matrix
from pyllamakv.verification.newest import newest

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.verification.cell import CellSpec

STOCK = {"src/a.cpp": code("first")}
FIXED = {"src/a.cpp": code("first", "fix(a);")}
NEAR = {"src/a.cpp": STOCK["src/a.cpp"].replace(b"first_2();", b"first_2(a);")}
CONFLICT = {"src/a.cpp": code("first", "fix(b);")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return five releases; the patch applies to four of them."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    for day, files in enumerate((STOCK, NEAR, STOCK, NEAR, CONFLICT), 1):
        bench.add_release(f"0.3.{day}", files, f"2025-01-0{day}")
    bench.add_patch("fix", {"0.3.1": (STOCK, FIXED)}, marker=("src/a.cpp", "first_7"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def verified(monkeypatch: pytest.MonkeyPatch, **verdicts: str) -> list[str]:
    """Set the verdicts of releases, else needed; return the list of verified ones."""
    asked: list[str] = []

    def run(specs: list[CellSpec], **_: Any) -> tuple[Any, ...]:
        (spec,) = specs
        asked.append(spec.release)
        verdict = verdicts.get(f"r{spec.release[-1]}", "needed")
        found = cell_results.result(spec.release, verdict=verdict, reason="a reason")
        return (replace(found, spec=spec),)

    monkeypatch.setattr(matrix, "run", run)
    return asked


@pytest.mark.slow
def test_newest_release_that_applies_is_verified(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good verdict ends the search, and the conflict on the next release is shown."""
    asked = verified(monkeypatch)
    found = newest(bench.releases.values(), patches=str(bench.folder))
    assert (found.release, found.verdict, found.first) == ("0.3.4", "needed", "0.3.5")
    assert asked == ["0.3.4"]
    (patch,) = found.conflicts
    assert (patch.id, patch.conflicts[0].file) == ("fix", "src/a.cpp")
    assert any(line.startswith("  fix: src/a.cpp, hunk 1") for line in found.lines())
    only = newest(bench.releases.values(), patches=str(bench.folder), verify=False)
    assert (only.release, only.verdict) == ("0.3.4", "")


def test_bad_verdict_of_the_newest_release_is_bisected(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bad release is named with its verdict; other bad verdicts count as bad."""
    asked = verified(monkeypatch, r4="harmful", r3="broken-build")
    found = newest(bench.releases.values(), patches=str(bench.folder))
    assert (found.release, found.first) == ("0.3.2", "0.3.3")
    assert found.reason == "broken-build: a reason"
    assert set(asked) == {"0.3.1", "0.3.2", "0.3.3", "0.3.4"}


@pytest.mark.slow
def test_series_without_a_good_release_has_no_newest(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no newest release; the oldest tested one is the first failure."""
    found = newest([bench.releases["0.3.5"]], patches=str(bench.folder))
    assert (found.release, found.first) == ("", "0.3.5")
    assert found.as_json()["release"] is None
    verified(monkeypatch, r1="harmful", r4="harmful")
    found = newest(bench.releases.values(), patches=str(bench.folder))
    assert (found.release, found.first) == ("", "0.3.4")
