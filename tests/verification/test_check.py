"""Check runs stock and patched, stores results, and decides the verdict."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from check_kit import SOME, CheckSandbox, ask, make
from fakes.simulated import SimulatedNative
from rich.console import Console

from pyllamakv.errors import (
    CommandFailed,
    FetchError,
    HarnessError,
    LoadError,
    NoPortApplies,
    PatchConflict,
    ToolMissing,
    UnknownRelease,
    UsageError,
    WorkerTimeout,
)
from pyllamakv.home import data
from pyllamakv.patching import series
from pyllamakv.patching.port_choice import Manual, Skipped
from pyllamakv.scenarios.scenario import CACHES
from pyllamakv.verification import check_report, discovery, parallel_runs
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.verdict import Verdict
from pyllamakv.view import check_console


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckSandbox:
    """Return a fake library whose stock fails and whose patched side passes."""
    return make(monkeypatch, tmp_path)


def test_patch_that_fixes_stock_is_needed(world: CheckSandbox) -> None:
    """Stock fails, patched passes, and every run is kept."""
    answer = ask()
    assert answer.decision.verdict is Verdict.NEEDED
    runs = len(discovery.find(SOME[0]).settings) + len(discovery.find(SOME[1]).settings)
    assert answer.decision.runs == runs
    assert [len(answer.runs[side]) for side in ("stock", "patched")] == [runs, runs]
    assert answer.variants == {"stock": "id-stock", "patched": "id-patched"}


@pytest.mark.slow
def test_repeated_check_uses_cached_results(world: CheckSandbox) -> None:
    """Results are cached by content; --fresh runs them again."""
    first = ask()
    opened = len(world.opener.opened)
    second = ask()
    assert len(world.opener.opened) == opened
    assert second.to_json() == first.to_json()
    ask(fresh=True)
    assert len(world.opener.opened) > opened
    assert all(held.closed for held in world.opener.opened)


def test_failing_stock_without_an_applicable_port_is_broken_apply(world: CheckSandbox) -> None:
    """No port applies and stock fails: a port is required, and nothing patched is built."""
    world.applied = NoPortApplies("src/llama-context.cpp hunk 2")
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_APPLY
    assert "hunk 2" in answer.decision.reason
    assert "patched" not in world.calls
    assert {run.outcome.status for run in answer.runs["stock"]} >= {"fail"}


def test_passing_stock_without_an_applicable_port_is_native(world: CheckSandbox) -> None:
    """No port applies and stock passes: upstream has the fix."""
    world.applied = PatchConflict("no such function")
    world.make = lambda side: SimulatedNative(heals=True)
    assert ask().decision.verdict is Verdict.NATIVE


def test_compile_error_of_patched_is_broken_build(world: CheckSandbox) -> None:
    """The first compiler error is the reason."""
    world.build_patched = CommandFailed("x", ["ninja"], 1, "log", "error: no member 'head'")
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_BUILD
    assert "no member 'head'" in answer.decision.reason


@pytest.mark.slow
def test_failing_carried_patch_is_broken_carry(world: CheckSandbox) -> None:
    """The failure of a carried patch is not attributed to the port of its base."""
    world.carried = {"full-defrag": "0.3.8"}
    assert ask().decision.verdict is Verdict.NEEDED
    good = ask()
    assert good.to_json()["carried"] == world.carried
    console = Console(file=io.StringIO(), width=80)
    check_console.show(good, {}, console)
    assert "patches: full-defrag (carried from 0.3.8)" in console.file.getvalue()
    world.make = lambda side: SimulatedNative(heals=side == "stock")
    answer = ask(fresh=True)
    assert (answer.decision.verdict, answer.decision.exit_code) == (Verdict.BROKEN_CARRY, 1)
    assert answer.decision.reason.startswith("carried full-defrag from 0.3.8: introduces ")
    world.build_patched = CommandFailed("x", ["ninja"], 1, "log", "error: no member 'head'")
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_CARRY
    assert answer.decision.reason == "carried full-defrag from 0.3.8: error: no member 'head'"


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("build_stock", CommandFailed("stock is broken", ["ninja"], 1, "log")),
        ("build_stock", ToolMissing("no C++ compiler")),
        ("build_patched", ToolMissing("no C++ compiler")),
        ("fetched", FetchError("no network")),
        ("applied", FetchError("the base of a port: no network")),
    ],
)
def test_failed_preparation_of_stock_is_untestable(
    world: CheckSandbox, where: str, error: Exception
) -> None:
    """A failed preparation of stock does not count against the patch."""
    setattr(world, where, error)
    answer = ask()
    assert answer.decision.verdict is Verdict.UNTESTABLE
    assert answer.decision.exit_code == 125
    assert str(error) in answer.decision.reason


def test_unloadable_library_is_broken_build_or_untestable(world: CheckSandbox) -> None:
    """If patched cannot be loaded, its build is broken; if stock cannot, it is untestable."""

    def refusing(side: str):
        def make(path_side: str) -> SimulatedNative:
            if path_side == side:
                msg = "undefined symbol: ggml_x"
                raise LoadError(msg)
            return SimulatedNative()

        return make

    world.make = refusing("patched")
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_BUILD
    assert "undefined symbol" in answer.decision.reason
    world.make = refusing("stock")
    assert ask(fresh=True).decision.verdict is Verdict.UNTESTABLE


def test_an_unknown_release_is_a_usage_error(world: CheckSandbox) -> None:
    """An unknown name is not reported as untestable."""
    world.fetched = UnknownRelease("no release 0.3.99")
    with pytest.raises(UnknownRelease):
        ask()


def test_patch_that_loses_tokens_is_harmful(world: CheckSandbox) -> None:
    """The reason names the scenario and the setting."""

    class Losing(SimulatedNative):
        def defrag(self, context):
            report = super().defrag(context)
            self._get(context).cache.remove(1)
            return report

    world.make = lambda side: Losing(heals=True) if side == "patched" else SimulatedNative()
    answer = ask()
    assert answer.decision.verdict is Verdict.HARMFUL
    assert "fork-then-defrag" in answer.decision.reason
    assert answer.decision.scenarios["fragmented"] is Verdict.NEEDED


def test_failing_scenario_code_raises_harness_error(world: CheckSandbox) -> None:
    """A broken scenario ends the check, and none of its results is cached."""

    class Odd(SimulatedNative):
        def seq_cp(self, *_):
            raise ZeroDivisionError

    world.make = lambda side: Odd(heals=True)
    with pytest.raises(HarnessError, match="fork-then-defrag"):
        ask()


def test_isolated_patch_is_verified_by_its_scenarios_and_guards(world: CheckSandbox) -> None:
    """One patch is verified by the scenarios that it names; the other guards must pass."""
    answer = ask(isolate="full-defrag", scenarios=(*SOME, "counters"))
    names = set(answer.decision.scenarios)
    assert "fragmented" in names
    assert "counters" not in names
    assert ("apply", ["full-defrag"]) in world.calls


def test_user_scenario_can_verify_one_patch(world: CheckSandbox, tmp_path: Path) -> None:
    """No shipped patch names the scenario; if it is selected by name, it runs."""
    text = discovery.find("fragmented").source.read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace('id="fragmented"', 'id="mine"'))
    folders = (tmp_path,)
    answer = ask(isolate="full-defrag", scenarios=("mine", "counters"), folders=folders)
    assert answer.decision.scenarios == {"mine": Verdict.NEEDED}


@pytest.mark.slow
def test_patch_file_is_verified_and_a_missing_one_refused(
    world: CheckSandbox, tmp_path: Path
) -> None:
    """A file is verified like a shipped patch; the error for a missing one names it."""
    file = _file(tmp_path)
    assert ask(patches=str(file)).decision.verdict is Verdict.NEEDED
    assert ("apply", None) in world.calls
    with pytest.raises(UsageError, match="nowhere"):
        ask(patches=str(tmp_path / "nowhere.patch"))
    with pytest.raises(UsageError, match="choose one"):
        ask(series=("full-defrag",), isolate="full-defrag")
    with pytest.raises(UsageError, match="full-defrag"):
        ask(isolate="full-defrga")


@pytest.mark.slow
def test_inapplicable_patch_file_is_native_only_if_contained(
    world: CheckSandbox, tmp_path: Path
) -> None:
    """Without claims, the patch is native only if the release contains it; runs cannot show it."""
    file = _file(tmp_path)
    world.applied = PatchConflict("hunk 1 does not apply")
    world.make = lambda side: SimulatedNative(heals=True)
    answer = ask(patches=str(file), scenarios=())
    assert str(answer.decision) == "broken-apply: hunk 1 does not apply"
    assert answer.pairs == ()
    world.applied = PatchConflict("hunk 1 is already applied", contained=True)
    answer = ask(patches=str(file), scenarios=())
    assert str(answer.decision) == "native: The release already contains all changes: " + (
        "drop the patch for this release."
    )
    _file(tmp_path, "other.patch")
    two = ask(patches=str(tmp_path), scenarios=())
    assert two.decision.verdict is Verdict.BROKEN_APPLY
    world.applied = PatchConflict("hunk 1 does not apply")
    assert ask(patches=str(file)).decision.verdict is Verdict.NATIVE


@pytest.mark.slow
def test_a_foreign_series_names_its_scenarios(world: CheckSandbox, tmp_path: Path) -> None:
    """A foreign series claims the scenarios that its patches name; one patch runs only its own."""
    mine = tmp_path / "mine"
    shutil.copytree(data("patches") / "quant-copy-fix", mine / "quant-copy-fix")
    (mine / "series.toml").write_text('schema = 1\norder = ["quant-copy-fix"]\n')
    own = {name for patch in series.load(mine) for name in patch.scenarios} & {"many-moves"}
    some = ("retry-between-ubatches", "many-moves", SOME[1])
    answer = ask(patches=str(mine), isolate="quant-copy-fix", scenarios=some)
    assert {*own, SOME[1]} <= set(answer.decision.scenarios)
    whole = ask(patches=str(mine), scenarios=some)
    assert set(whole.decision.scenarios) == set(some)


@pytest.mark.slow
def test_runs_skipped_after_hangs_give_no_good_verdict(
    world: CheckSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both sides hang, a patch without claims is untested; a failed claim is reported."""

    class Hanging(SimulatedNative):
        def decode(self, *_):
            raise WorkerTimeout("no answer")

    chosen = [replace(discovery.find(name), settings=CACHES) for name in SOME]
    monkeypatch.setattr(discovery, "select", lambda *_: chosen)
    monkeypatch.setattr(parallel_runs, "default_workers", lambda: 1)
    world.make = lambda side: Hanging()
    answer = ask(patches=str(_file(tmp_path)), scenarios=())
    assert answer.decision.verdict is Verdict.UNTESTABLE
    assert f"{answer.stopped} runs were not made" in answer.decision.reason
    world.make = lambda side: Hanging() if side == "stock" else SimulatedNative()
    answer = ask(patches=str(_file(tmp_path)), scenarios=("fragmented",), fresh=True)
    assert answer.decision.verdict is Verdict.INEFFECTIVE
    broken = [pair for pair in answer.pairs if pair.patched and pair.patched.failed]
    assert len(broken) == len(CACHES)


@pytest.mark.slow
def test_imported_patch_without_claims_has_the_verdict_of_its_file(
    world: CheckSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the verdict of its file, also if it is checked in the series."""
    some = [discovery.find(name) for name in SOME]
    monkeypatch.setattr(discovery, "select", lambda *_: some)
    world.make = lambda side: SimulatedNative()
    mine = tmp_path / "mine"
    shutil.copytree(data("patches") / "quant-copy-fix", mine / "quant-copy-fix")
    (mine / "series.toml").write_text('schema = 1\norder = ["quant-copy-fix"]\n')
    toml = mine / "quant-copy-fix" / "patch.toml"
    text = re.sub(r"scenarios = \[[^]]*\]", 'author = "A <a@b>"\nscenarios = []', toml.read_text())
    toml.write_text(text)
    answer = ask(patches=str(mine), scenarios=())
    assert answer.decision.verdict is Verdict.HARMLESS
    monkeypatch.setattr(series, "load", partial(series.load, mine))
    answer = ask(isolate="quant-copy-fix", scenarios=())
    assert answer.decision.verdict is Verdict.HARMLESS
    assert set(answer.decision.scenarios) == set(SOME)


@pytest.mark.slow
def test_scenarios_that_limit_a_request_are_not_claimed(
    world: CheckSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that stock shares is then no failed claim; one of stock alone is a fix."""
    foreign = {"patches": str(_file(tmp_path)), "scenarios": ("fragmented",)}
    world.make = lambda side: SimulatedNative()
    assert ask(**foreign).decision.verdict is Verdict.INEFFECTIVE
    assert ask(**foreign, limit=True).decision.verdict is Verdict.HARMLESS
    assert CellSpec("0.3.9", **foreign).check_request().limit
    world.make = lambda side: SimulatedNative(heals=side == "patched")
    assert ask(**foreign, limit=True, fresh=True).decision.verdict is Verdict.NEEDED
    # A guard that the user selects is a fix if the patches claim others.
    mine = tmp_path / "mine"
    shutil.copytree(data("patches") / "quant-copy-fix", mine / "quant-copy-fix")
    (mine / "series.toml").write_text('schema = 1\norder = ["quant-copy-fix"]\n')
    guard = replace(discovery.find("fragmented"), kind="guard")
    monkeypatch.setattr(discovery, "select", lambda *_: [guard])
    answer = ask(patches=str(mine), scenarios=("fragmented",), limit=True, fresh=True)
    assert answer.decision.verdict is Verdict.NEEDED


@pytest.mark.slow
def test_junit_reports_no_failure_that_stock_shares(
    world: CheckSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the verdict, only claimed failures, or those that stock does not have, count."""
    some = [discovery.find(name) for name in SOME]
    monkeypatch.setattr(discovery, "select", lambda *_: some)
    world.make = lambda side: SimulatedNative()
    foreign = ask(patches=str(_file(tmp_path)), scenarios=())
    assert foreign.decision.verdict is Verdict.HARMLESS
    assert foreign.decision.shared
    claimed = ask(patches=str(_file(tmp_path)), scenarios=("fragmented",))
    counts = [
        [suite.get("failures") for suite in ET.fromstring(check_report.junit(answer))]
        for answer in (foreign, claimed)
    ]
    runs = str(len(discovery.find("fragmented").settings))
    assert counts == [["0", "0", "0"], ["0", runs, "1"]]


def _file(folder: Path, name: str = "theirs.patch") -> Path:
    file = folder / name
    file.write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", encoding="utf-8")
    return file


def test_broken_apply_reason_names_the_drift(world: CheckSandbox) -> None:
    """The reason is the drift of the patch or, without one, the conflict in a line."""
    world.applied = PatchConflict("one does not apply\n  expected: x")
    assert ask().decision.reason.endswith("; one does not apply")
    world.why = "hunk 2, changed in 0.3.10"
    assert ask(fresh=True).decision.reason.endswith("; hunk 2, changed in 0.3.10")


def test_skipped_patch_with_a_conflict_is_broken_apply(world: CheckSandbox) -> None:
    """A scenario of a patch that did not apply has no patched side."""
    world.skipped = (Skipped("full-defrag", "hunk 4 fails", (PatchConflict("hunk 4"),)),)
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_APPLY
    assert "hunk 4" in answer.decision.reason
    assert answer.skipped == {"full-defrag": "hunk 4 fails"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id_", "scenario"),
    [
        ("kv-counters", "counters"),
        ("decode-rollback", "fork-then-defrag"),
        # a fix scenario whose feature neither side has
        ("compaction", "compact-mrope"),
    ],
)
def test_uncarried_patch_without_runs_is_broken_apply(
    world: CheckSandbox, monkeypatch: pytest.MonkeyPatch, id_: str, scenario: str
) -> None:
    """The others are needed, and no run tests this patch: it requires manual work."""
    some = [discovery.find(name) for name in ("fragmented", scenario)]
    monkeypatch.setattr(discovery, "select", lambda *_: some)
    shipped = [
        replace(each, scenarios=(scenario,) if each.id == id_ else ("fragmented",))
        for each in series.load()
        if each.id in (id_, "full-defrag")
    ]
    monkeypatch.setattr(series, "load", lambda: series.Series(tuple(shipped)))
    manual = Manual("0.3.8", "src/a.cpp:4: upstream changed the lines that the patch changes")
    left = Skipped(id_, f"cannot be carried from 0.3.8: {manual.reason}", manual=(manual,))
    world.skipped = (left,)
    answer = ask(scenarios=())
    assert answer.decision.verdict is Verdict.BROKEN_APPLY
    assert answer.decision.reason == left.reason
    assert answer.decision.scenarios["fragmented"] is Verdict.NEEDED
    conflict = PatchConflict("hunk 1 is already applied", contained=True)
    waiting = replace(manual, lacks="another")
    for other in (
        Skipped(id_, "is meant for <0.3.9, not for 0.3.9"),
        Skipped(id_, "requires another", manual=(waiting,)),
        Skipped(id_, "contains it", (conflict,), (manual,)),
    ):
        world.skipped = (other,)
        assert ask(scenarios=()).decision.verdict is Verdict.NEEDED
    world.skipped = (left,)
    assert ask().decision.verdict is Verdict.NEEDED, "no scenario of the patch was requested"
    without = [replace(each, scenarios=()) if each.id == id_ else each for each in shipped]
    monkeypatch.setattr(series, "load", lambda: series.Series(tuple(without)))
    assert ask().decision.verdict is Verdict.BROKEN_APPLY, "no run can decide on it"


def test_uncarried_patch_is_broken_apply(world: CheckSandbox) -> None:
    """It counts like a conflict; a patch that depends on a missing one does not."""
    manual = Manual("0.3.8", "src/a.cpp:4: upstream changed the lines that the patch changes")
    world.skipped = (Skipped("full-defrag", "src/a.cpp:4", manual=(manual,)),)
    answer = ask()
    assert answer.decision.verdict is Verdict.BROKEN_APPLY
    assert "src/a.cpp:4" in answer.decision.reason
    waiting = Manual("0.3.8", "requires another", lacks="another")
    assert not Skipped("full-defrag", "requires another", manual=(waiting,)).failed
