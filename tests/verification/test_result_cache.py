"""Results are found again by content, and only by content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.cell_results import failing, result, row

from pyllamakv.errors import ToolMissing
from pyllamakv.verification import result_cache
from pyllamakv.verification.cell import CellSpec

SPEC = CellSpec("0.3.9")


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path: Path) -> Path:
    """Give every test a home of its own, and patches that it may change."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "a.patch").write_text("a")
    monkeypatch.setattr(result_cache, "data", lambda name: tmp_path / name)
    return patches


def test_the_key_depends_on_what_decides(place: Path) -> None:
    """Another spec, patch or kind of machine is another key; what is accepted is not."""
    first = result_cache.key(SPEC)
    assert first and first == result_cache.key(SPEC)
    (place / "expected.toml").write_text("schema = 1")
    assert result_cache.key(SPEC) == first
    assert result_cache.key(SPEC, "elsewhere") != first
    assert result_cache.key(replace(SPEC, scenarios=("fragmented",))) != first
    assert result_cache.key(CellSpec("0.3.8")) != first
    (place / "a.patch").write_text("b")
    assert result_cache.key(SPEC) != first


def test_the_key_of_another_series_depends_on_its_content(tmp_path: Path) -> None:
    """On its patches and claims, and not on those that ship."""
    file = tmp_path / "mine.patch"
    file.write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    spec = replace(SPEC, patches=str(file))
    first = result_cache.key(spec)
    assert first and first != result_cache.key(SPEC)
    (tmp_path / "patches" / "a.patch").write_text("b")
    assert result_cache.key(spec) == first
    file.write_text("Scenario: fragmented\n" + file.read_text())
    assert result_cache.key(spec) != first


def test_no_key_without_tools(monkeypatch) -> None:
    """Where nothing can be built nothing is remembered either."""

    def missing(*_):
        raise ToolMissing("no compiler")

    monkeypatch.setattr(result_cache.compiler, "find", missing)
    assert result_cache.key(SPEC) is None
    assert result_cache.key(CellSpec("nonsense")) is None
    assert result_cache.load_result(None) is None


def test_a_result_with_a_former_scenario_id_can_be_read() -> None:
    """It has no key, so a later run verifies the cell again; its latest result is still shown."""
    former = CellSpec("0.3.9", scenarios=("memory-sliding",))
    assert result_cache.key(former) is None
    kept = result(spec=former, scenarios=(row("memory-sliding", kind="guard"),))
    result_cache.store_result(None, kept)
    assert result_cache.latest_result(former) == replace(kept, stale=True)


def test_stock_results_are_pass_fail_or_skip(place: Path) -> None:
    """Each scenario passed or failed on stock; a fix that cannot run has no result."""
    assert result_cache.stock("0.3.9") == {}
    rows = (
        row("a", stock="passes 6"),
        row("b", stock="fails 1/6: data"),
        row("c", stock="absent 2/2"),
        row("d", kind="feature", stock="absent 2/2"),
        row("e", stock="skipped"),
    )
    result_cache.store_result(None, result(scenarios=rows))
    ended = {"a": "pass", "b": "fail", "c": "skip", "d": "fail", "e": "skip"}
    assert result_cache.stock("0.3.9") == ended


def test_latest_is_marked_when_inputs_changed(place: Path) -> None:
    """An old result is shown as what it is."""
    assert result_cache.latest_result(SPEC) is None
    result_cache.store_result(result_cache.key(SPEC), result())
    assert result_cache.latest_result(SPEC) == result()
    (place / "a.patch").write_text("c")
    assert result_cache.latest_result(SPEC) == result(stale=True)
    assert result_cache.latest_of([SPEC, CellSpec("0.3.8")]) == (result(stale=True),)


@pytest.mark.parametrize(
    "passing",
    [
        result(verdict="untestable"),
        result(verdict="broken-build"),
        result(verdict="harmful", failing=(replace(failing(), failure="hang"),)),
    ],
)
def test_temporary_failures_are_not_cached(passing) -> None:
    """A machine's trouble of the moment is shown, but never taken for the result."""
    name = result_cache.key(SPEC)
    result_cache.store_result(name, passing)
    assert result_cache.load_result(name) is None
    assert result_cache.latest_result(SPEC) == passing


@pytest.mark.regression(
    "a result whose writing was killed was found by its key and never became the latest",
    by="faults",
    of="Python",
)
def test_a_cached_result_is_the_latest_one(monkeypatch) -> None:
    """A cached result is not written again: a kill in between changes nothing."""
    real, written = result_cache.write_text_atomic, []

    def killed(file: Path, text: str) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(file)
        real(file, text)

    monkeypatch.setattr(result_cache, "write_text_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        result_cache.store_result("a key", result())
    assert result_cache.load_result("a key") is None


def test_damage_is_no_result(place: Path) -> None:
    """A half-written or foreign file is as good as none."""
    name = result_cache.key(SPEC)
    result_cache.store_result(name, result())
    for file in (place.parent / "home" / "results").rglob("*.json"):
        file.write_text("{")
    assert result_cache.load_result(name) is None
    assert result_cache.latest_result(SPEC) is None


def test_a_home_that_cannot_be_written_costs_no_verdict(monkeypatch, tmp_path: Path) -> None:
    """Keeping is best effort."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "file"))
    result_cache.store_result("0" * 64, result())
