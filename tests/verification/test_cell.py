"""Test that cells and their results are saved as JSON, and that any error is a result."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.cell_results import failing, result, row

from pyllamakv.errors import FetchError, GitError, HarnessError, ToolMissing
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.scenarios.runner import Run
from pyllamakv.source.releases import Release
from pyllamakv.verification import cell as cells
from pyllamakv.verification.cell import CellResult, CellSpec
from pyllamakv.verification.check import CheckRequest, CheckResult
from pyllamakv.verification.verdict import Pair, decide

RELEASE = Release("0.3.9", "sdist", "1" * 40, "2" * 40, "unified", "2025-05-08T00:00:00Z")
FAIL, PASS = Outcome("fail", "claim", "no slot"), Outcome("pass")


def answer(question: CheckRequest) -> CheckResult:
    """Return results like a check: a needed fix, a passing guard, a failing setting."""
    pairs = (
        Pair("fragmented", "fix", "plain f16", FAIL, PASS),
        Pair("fork-then-defrag", "guard", "plain f16", PASS, PASS),
        Pair("many-moves", "fix", "flash f16", FAIL, FAIL),
    )
    picture = Picture("after", (0, 0, -1))
    runs = {"patched": (Run("fragmented", "plain f16", PASS, pictures=(picture,)),)}
    ids = {"stock": "s", "patched": "p"}
    return CheckResult(question, decide(pairs), pairs, runs, ids, ("full-defrag",), {"x": "why"})


@pytest.fixture
def world(monkeypatch, tmp_path: Path) -> SimpleNamespace:
    """Replace all calls of a cell; errors in its fields are raised."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    world = SimpleNamespace(fetch=None, build=None, check=None, drift=None, built=[], asked=[])

    def trouble(name: str) -> None:
        if isinstance(getattr(world, name), BaseException):
            raise getattr(world, name)

    def ensure(spec, **_):
        trouble("fetch")
        return RELEASE

    def build(spec, **_):
        world.built.append(str(spec))
        trouble("build")

    def build_series(release, names, _patches, **_):
        build(f"{release}+{'+'.join(names) if names else 'patched'}")

    def check(question, **_):
        world.asked.append(question)
        trouble("check")
        return answer(question)

    def drift(release, ids, **_):
        trouble("drift")
        return [SimpleNamespace(as_json=lambda: {"patch": "full-defrag", "hunks": []})]

    monkeypatch.setattr(cells.fetch, "ensure", ensure)
    monkeypatch.setattr(cells, "build", build)
    monkeypatch.setattr(cells, "build_series", build_series)
    monkeypatch.setattr(cells.checking, "check", check)
    monkeypatch.setattr(cells.drift, "drift", drift)
    return world


def test_verified_cell_has_verdict_counts_drift_and_pictures(world) -> None:
    """Verdict, counts, rows, drift, snapshots and the release's data are in the result."""
    found = cells.verify_cell(CellSpec("0.3.9"))
    assert (found.verdict, found.era, found.commit) == ("ineffective", "unified", "1" * 40)
    assert (found.runs, found.stock_failed, found.patched_failed) == (3, 2, 1)
    assert [row.word for row in found.scenarios] == ["needed", "holds", "ineffective"]
    assert found.scenarios[0].claim
    assert found.failing == (cells.FailedRun("many-moves", "flash f16", "claim", "no slot"),)
    assert found.pictures == ({"side": "patched", "label": "after", "runs": [[0, 2], [-1, 1]]},)
    assert found.drift == ({"patch": "full-defrag", "hunks": []},)
    assert found.skipped == {"x": "why"}
    assert world.built == ["0.3.9+stock", "0.3.9+patched"]
    assert found.measured == "stock fails 2 of 3 runs, patched 1"


def test_spec_and_result_round_trip_through_json() -> None:
    """A spec and a result are equal after a round trip."""
    spec = CellSpec("b4980", ("a", "b"), backend="cuda", native=False, scenarios=("fragmented",))
    assert CellSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    whole = result(spec=spec, failing=(failing(),))
    assert CellResult.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert spec.name == "b4980 [a,b] (fragmented) portable cuda"


def test_quick_cell_is_checked_in_few_settings() -> None:
    """The request, the name and the key of the result contain it."""
    spec = CellSpec("0.3.9", quick=True)
    assert spec.check_request().quick
    assert not CellSpec("0.3.9").check_request().quick
    assert spec.name == "0.3.9 quick"
    assert CellSpec.from_json(spec.to_json()) == spec
    assert spec.to_json() != CellSpec("0.3.9").to_json()


def test_a_result_with_older_keys_can_be_read() -> None:
    """``films`` and ``judged`` are the former names of ``timelines`` and ``verified``."""
    whole = result(verified="2026-11-22T01:02:03+00:00", timelines=({"label": "a"},))
    raw = whole.to_json()
    raw["films"], raw["judged"] = raw.pop("timelines"), raw.pop("verified")
    assert CellResult.from_json(raw) == whole


def test_a_result_with_the_older_kind_can_be_read() -> None:
    """A fix scenario has the kind ``cure`` in results of version 0.1 and earlier."""
    whole = result(scenarios=(row("a"), row("b", kind="guard")))
    raw = json.loads(json.dumps(whole.to_json()))
    raw["scenarios"][0]["kind"] = "cure"
    assert CellResult.from_json(raw) == whole


@pytest.mark.parametrize(
    "raw", [{}, {"spec": {}}, {**result().to_json(), "verdict": "splendid"}, {"x": 1}]
)
def test_file_of_another_shape_is_refused_as_a_result(raw) -> None:
    """A file of another structure is a ValueError."""
    with pytest.raises(ValueError, match=r"not a result|splendid"):
        CellResult.from_json(raw)


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("fetch", FetchError("no network"), "no network"),
        ("check", ToolMissing("no compiler"), "no compiler"),
        ("check", GitError(["git"], 128, "fatal"), "`git` exited with 128: fatal"),
        ("check", HarnessError("odd"), "a fault of the harness: odd"),
        ("check", ZeroDivisionError("odd"), "a fault of the harness: ZeroDivisionError: odd"),
    ],
)
def test_failed_cell_is_a_result(world, where: str, error: Exception, says: str) -> None:
    """No error in a cell ends the matrix."""
    setattr(world, where, error)
    found = cells.verify_cell(CellSpec("0.3.9"))
    assert (found.verdict, found.reason) == ("untestable", says)
    assert found.measured == says


def test_failed_build_of_stock_does_not_decide_the_verdict(world) -> None:
    """The check repeats the failed build and reports it."""
    world.build, world.drift = ToolMissing("no compiler"), FetchError("gone")
    found = cells.verify_cell(CellSpec("0.3.9", isolate="full-defrag", backend="cuda"))
    assert found.verdict == "ineffective"
    assert world.built == ["0.3.9+stock"]
    assert found.drift == ()
    assert (world.asked[0].isolate, world.asked[0].backend) == ("full-defrag", "cuda")


def test_interrupt_of_a_cell_is_raised(world) -> None:
    """Ctrl-C ends the whole matrix."""
    world.check = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cells.verify_cell(CellSpec("0.3.9"))


def test_verified_cell_round_trips_through_json(world) -> None:
    """Executors in other processes get only plain values."""
    raw = cells.verify_cell_json(CellSpec("0.3.9").to_json(), True)
    assert CellResult.from_json(json.loads(json.dumps(raw))).verdict == "ineffective"
    assert world.asked[0].fresh


def test_cell_without_a_patched_side_is_reported_as_not_patched() -> None:
    """A release without an applicable port is reported."""
    assert result(variants={"stock": "s"}).measured == "stock fails 55 of 77 runs, not patched"
