"""Test that fault injection finds planted faults: partial files, locks, clocks, lost data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.building import variant
from pyllamakv.errors import HarnessError
from pyllamakv.runtime import state
from pyllamakv.runtime.sequence import Sequence
from pyllamakv.scenarios import synthetic_models
from qa import faults
from qa.entry import StressOptions
from qa.faults import preloaded_process
from qa.faults.attempt import AttemptResult
from qa.faults.fault_injection import FILES, InjectionRecord
from qa.faults.steps import caching
from qa.faults.steps.result_writing import StoreResults

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="faults need a C compiler")


def conduct(name: str, *kinds: str, seconds: float = 4.0) -> dict[str, InjectionRecord]:
    """Inject faults into one of the planted steps; return the records by kind."""
    steps = [(f"fakes.faulty_steps:{name}", [])]
    tried: list[str] = []
    records = preloaded_process.run_injections(
        steps, kinds, seconds=seconds, seed=1, tick=tried.append
    )
    assert len(tried) == sum(record.tried for record in records)
    return {record.kind: record for record in records}


@pytest.mark.slow
def test_correct_step_passes_every_fault() -> None:
    """Each change is a fault location for each kind; all repeats succeed."""
    found = conduct("Careful", *FILES, "stop", "clock", "memory", seconds=30.0)
    for kind in (*FILES, "stop", "clock", "memory"):
        assert found[kind].defects == []
        assert found[kind].tried > 3
        assert found[kind].tried >= found[kind].struck == found[kind].repeated
    # As many as there are changes, for each kind.
    assert found["kill"].tried == found["eio"].tried == found["stop"].tried
    # Every kill has an effect; a write that needs no more space, or an unused clock, has none.
    assert found["kill"].struck == found["one"].struck == found["stop"].struck
    assert found["kill"].struck == found["kill"].tried > found["once"].struck > 0
    assert found["clock"].struck == 0
    assert found["full"].errors["DiskFull"] > 1
    assert found["eio"].errors["DiskFailed"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        ("InPlace", "kill", "the repeat failed: JSONDecodeError"),
        ("InPlace", "full", "not an error of pyllamakv.errors: OSError"),
        ("InPlace", "stop", "not an error of pyllamakv.errors: JSONDecodeError"),
        ("Littering", "kill", "left behind after the repeat: home/tmp"),
        ("Locking", "kill", "the repeat failed: SourceError"),
        ("Locking", "stop", "it failed: SourceError"),
        ("Believing", "clock", "it failed: SourceError: the lock is too old"),
        ("Silent", "once", "with the fault it returned"),
        ("Silent", "fsize", "with the fault it returned"),
        ("Confused", "memory", "not an error of pyllamakv.errors: ValueError"),
    ],
)
def test_planted_defects_are_found_by_fault_injection(step: str, kind: str, words: str) -> None:
    """A finding names the fault and its effect."""
    found = conduct(step, kind)[kind]
    assert found.defects
    assert any(words in defect for defect in found.defects), found.defects
    assert all(f"{kind} " in defect for defect in found.defects)


@pytest.mark.slow
def test_memory_limit_raises_memory_error() -> None:
    """Runs with too little memory end with MemoryError, the others succeed."""
    found = conduct("Hungry", "memory")["memory"]
    assert found.defects == []
    assert 0 < found.errors["MemoryError"] < found.tried


@pytest.mark.slow
def test_import_error_under_a_memory_limit_is_accepted() -> None:
    """An import error without a cause is a typed error of this package."""
    found = conduct("Starved", "memory")["memory"]
    assert found.defects == []
    assert found.errors["OSError"] == found.tried == found.struck == found.repeated


@pytest.mark.slow
def test_full_mounted_disk_is_reported_as_a_defect() -> None:
    """A real full disk, if one can be mounted."""
    found = conduct("InPlace", "room")
    if "room" not in found:
        pytest.skip("no disk can be mounted here")
    assert any("No space left" in defect for defect in found["room"].defects)


def test_a_missing_step_is_an_error() -> None:
    """A missing step is an error of the harness, not a passed step."""
    with pytest.raises(HarnessError, match="NoSuchStep"):
        conduct("NoSuchStep", "kill")


@pytest.mark.slow
def test_fault_entry_lists_attempted_faults() -> None:
    """Only the selected steps run, and the repository's own results are unchanged."""
    effort = StressOptions(seconds=3.0, seed=5, only=("results",))
    (results,) = faults.entries(effort, lambda _: None)
    assert results.defects == ()
    assert results.seed == 5
    assert results.data["faults"] == results.data["repeated"] >= 1
    assert set(results.data["kinds"]) <= set(FILES)
    assert results.row["faults"] == str(results.data["faults"])


@pytest.mark.slow
def test_faults_that_are_never_reached_are_not_counted() -> None:
    """Unreached limits and changes are attempted, and not counted."""
    found = conduct("Careful", "fsize", "memory", seconds=30.0)
    # It writes some 700 bytes, so smaller limits truncate it.
    assert found["fsize"].tried == 11 and found["fsize"].struck == 4
    assert found["memory"].struck < found["memory"].tried
    assert conduct("Forgiving", "fsize", seconds=30.0)["fsize"].struck == 4
    assert conduct("Believing", "clock")["clock"].struck > 0
    entry = faults._entry("x", list(found.values()), StressOptions())
    struck = found["fsize"].struck + found["memory"].struck
    tried = found["fsize"].tried + found["memory"].tried
    assert entry.row["faults"] == entry.row["repeats that worked"] == str(struck)
    assert entry.row["without effect"] == str(tried - struck)
    assert "4 limits of the file size" in entry.row["of them"]


@pytest.mark.slow
def test_step_without_changes_or_build_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that changes no file is a defect; one that is not built is named."""
    found = conduct("Starved", "kill", "memory")
    assert found["kill"].defects == ["starved, kill: the step changed no file"]
    assert found["memory"].tried and not found["memory"].defects
    assert not faults._empty(faults._entry("x", [found["kill"]], StressOptions()))
    monkeypatch.setattr(variant, "find", lambda *_: None)
    effort = StressOptions(seconds=1.0, only=("keeping", "matrix"))
    lacking = faults.entries(effort, lambda _: None)
    assert [entry.name for entry in lacking] == ["keeping", "matrix"]
    assert all("skipped: 0.3.9+patched is not built" in e.skip_reason for e in lacking)


def test_a_skipped_kind_of_fault_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no disk can be mounted, file size limits are only a weak test of full disks."""
    met = [InjectionRecord("x", "fsize", tried=3, struck=2)]
    monkeypatch.setattr(faults, "_walked", lambda *_: met)
    effort = StressOptions(only=("full disks",))
    (entry,) = faults.entries(effort, lambda _: None)
    assert entry.ran and entry.skip_reason == "skipped: disks with little space"
    met.append(InjectionRecord("x", "room", tried=1))
    (entry,) = faults.entries(effort, lambda _: None)
    assert not entry.skip_reason


def test_partial_result_is_detected_before_the_repeat(tmp_path: Path) -> None:
    """A concurrent reader would repeat work whose result exists."""
    step, kept = StoreResults(), tmp_path / "home" / "results" / "runs" / "one.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert step.check_interrupted(tmp_path, AttemptResult("killed"), None) == []
    kept.write_text('{"half')
    (problem,) = step.check_interrupted(tmp_path, AttemptResult("killed"), None)
    assert problem.startswith("one.json cannot be read")


@pytest.mark.slow
def test_fault_entry_counts_all_places() -> None:
    """Each change is a location for each kind; those that were not reached in time count too."""
    whole, short = (
        conduct("Careful", "kill", "eio", seconds=30.0),
        conduct("Careful", "eio", "kill", seconds=0.0),
    )
    assert whole["kill"].places == whole["kill"].tried == short["kill"].places
    row = faults._entry("x", list(short.values()), StressOptions()).row
    assert row["tried"] == f"1 of {2 * short['eio'].places} places"


@pytest.mark.slow
@pytest.mark.native
def test_disturbed_matrix_has_the_same_results(stock: Variant, patched: Variant) -> None:
    """A real cell is verified on stock and patched; one that a fault ended is verified again."""
    (matrix,) = faults.entries(StressOptions(seconds=2.0, seed=3, only=("matrix",)), lambda _: None)
    assert matrix.defects == ()
    assert matrix.data["faults"] == matrix.data["repeated"] >= 1


@pytest.mark.slow
def test_a_step_that_a_release_does_not_support_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only some steps may be refused; any other failure without a fault is a defect."""
    found = conduct("Refused", "kill")
    assert found["none"].defects == []
    assert "fails without a fault: Unsupported" in conduct("Refusing", "kill")["none"].defects[0]
    met = [InjectionRecord("parking 0.3.36", "none")]
    monkeypatch.setattr(faults, "_walked", lambda *_: met)
    monkeypatch.setattr(variant, "find", lambda _: SimpleNamespace(folder=Path("/x")))
    (entry,) = faults.entries(StressOptions(only=("parking 0.3.36",)), lambda _: None)
    assert entry.skip_reason == "skipped: this release does not support it"


def test_a_long_run_tests_caches_of_every_era(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built releases are tested; a named one that is not built is skipped."""
    built = SimpleNamespace(folder=Path("/builds/x"))
    monkeypatch.setattr(variant, "find", lambda spec: built if spec == "0.3.36+patched" else None)
    monkeypatch.setattr(
        "pyllamakv.verification.matrix.plan",
        lambda _: [SimpleNamespace(release=name) for name in ("0.3.9", "0.3.36", "b11549")],
    )
    assert faults._other_releases(StressOptions(seconds=100.0)) == {}
    later = faults._other_releases(StressOptions(seconds=faults.LONG, only=("parking", "paging")))
    assert later == {
        "paging 0.3.36": built.folder,
        "paging b11549": None,
        "parking 0.3.36": built.folder,
        "parking b11549": None,
    }
    assert set(later) < set(faults.names())
    wanted: list[Any] = []
    monkeypatch.setattr(
        preloaded_process, "run_injections", lambda steps, *_, **__: wanted.extend(steps) or []
    )
    effort = StressOptions(seconds=1.0, only=("checkpoints 0.3.36", "parking b11549"))
    found = faults.entries(effort, lambda _: None)
    assert {entry.name: entry.skip_reason for entry in found} == {
        "checkpoints 0.3.36": "skipped: the time limit was reached: increase --seconds",
        "parking b11549": "skipped: it is not built; run: pyllamakv build b11549",
    }
    ((place, (folder, model, release)),) = wanted
    assert place.endswith("caching:KeepCheckpoints")
    assert (folder, release) == ("/builds/x", "0.3.36")
    assert "recurrent" in model


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "model"),
    [
        (caching.KeepCheckpoints, "recurrent"),
        (caching.ParkGenerations, "tiny"),
        (caching.StoreStates, "recurrent"),
    ],
)
def test_steps_of_caches_write_files_and_repeat(
    patched: Variant,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: type[caching.NativeStep],
    model: str,
) -> None:
    """Without a fault, two runs return the same; wrong rows in a page are found."""
    written: list[str] = []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(str(b)), rename(a, b)))
    one = step(patched.folder, synthetic_models.model(model))
    two = step(patched.folder, synthetic_models.model(model), "0.3.36")
    assert two.name == f"{one.name} 0.3.36"
    first = one.run(tmp_path)
    assert len(written) > 3
    assert one.run(tmp_path) == first
    if step is caching.KeepCheckpoints:
        monkeypatch.setattr(Sequence, "save", save_other_rows)
        with pytest.raises(AssertionError, match="differ by"):
            one.run(tmp_path)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("step", [caching.StorePrefixes, caching.StoreStates])
def test_a_repeat_keeps_the_pages_of_an_undisturbed_run(
    patched: Variant,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: type[caching.StorePrefixes],
) -> None:
    """The interrupted run wrote the pages of the last flush, and removed none."""
    model = "recurrent" if step is caching.StoreStates else "tiny"
    one = step(patched.folder, synthetic_models.model(model))
    assert not one.allowed_leftovers
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir(), twice.mkdir()
    result = one.run(once)
    with monkeypatch.context() as patch:

        def interrupted(_: Path, count: int) -> None:
            if not count:
                raise KeyboardInterrupt

        patch.setattr(one, "note", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.run(twice)
    assert one.run(twice) == result
    assert one.files(twice) == one.files(once)


def save_other_rows(sequence: Sequence, **_: bool) -> bytes:
    """Save the tokens of a sequence with the rows of others."""
    context = sequence.context
    with context.model.context(n_ctx=512, n_batch=64) as other:
        other.sequence().prefill([1] * len(sequence))
        raw = other.native.state_save(other.handle, 0)
    return state.pack(context, sequence.ledger, raw)
