"""Test that results are cached by content."""

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
    """Give every test its own data directory, and patches that it may change."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "a.patch").write_text("a")
    monkeypatch.setattr(result_cache, "data", lambda name: tmp_path / name)
    return patches


def test_key_depends_on_spec_patches_and_machine(place: Path) -> None:
    """Another spec, patch or kind of machine has another key; accepted verdicts do not."""
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
    """It depends on the patches and claims of the series, and not on the shipped ones."""
    file = tmp_path / "mine.patch"
    file.write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    spec = replace(SPEC, patches=str(file))
    first = result_cache.key(spec)
    assert first and first != result_cache.key(SPEC)
    (tmp_path / "patches" / "a.patch").write_text("b")
    assert result_cache.key(spec) == first
    file.write_text("Scenario: fragmented\n" + file.read_text())
    assert result_cache.key(spec) != first


def test_key_without_a_compiler_is_none(monkeypatch) -> None:
    """If nothing can be built, nothing is cached."""

    def missing(*_):
        raise ToolMissing("no compiler")

    monkeypatch.setattr(result_cache.compiler, "find", missing)
    assert result_cache.key(SPEC) is None
    assert result_cache.key(CellSpec("nonsense")) is None
    assert result_cache.load_result(None) is None


def test_a_result_with_a_former_scenario_id_can_be_read() -> None:
    """It has no key, so a later run verifies the cell again; its last result is still shown."""
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
    """A result of other inputs is shown as outdated."""
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
    """They are shown, but not used as results."""
    name = result_cache.key(SPEC)
    result_cache.store_result(name, passing)
    assert result_cache.load_result(name) is None
    assert result_cache.latest_result(SPEC) == passing


@pytest.mark.regression(
    "a result whose write was killed was found by its key, but never became the latest one",
    by="faults",
    of="Python",
)
def test_a_cached_result_is_the_latest_one(monkeypatch) -> None:
    """A cached result is not written again, so a kill during the write has no effect."""
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


def test_damaged_result_is_ignored(place: Path) -> None:
    """A truncated file, or one of another format, is ignored."""
    name = result_cache.key(SPEC)
    result_cache.store_result(name, result())
    for file in (place.parent / "home" / "results").rglob("*.json"):
        file.write_text("{")
    assert result_cache.load_result(name) is None
    assert result_cache.latest_result(SPEC) is None


def test_unwritable_data_directory_does_not_fail_a_verdict(monkeypatch, tmp_path: Path) -> None:
    """Caching is best effort."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "file"))
    result_cache.store_result("0" * 64, result())
