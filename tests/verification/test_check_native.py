"""Test that each fix fails on stock and passes on patched, and that guards pass on patched."""

from __future__ import annotations

import pytest

from pyllamakv.building import variant as variants
from pyllamakv.patching import series
from pyllamakv.scenarios.runner import Run, ScenarioRunner
from pyllamakv.scenarios.scenario import Scenario, Setting
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.check import pair_up
from pyllamakv.verification.verdict import Verdict, decide

ALL = discovery.discover()
#: Features belong to their own patches.
JUDGED = [each for each in ALL.values() if each.kind != "feature"]
#: Fixes of defects that upstream fixed earlier, and the last release with the defect.
CURED_SINCE = {"quantized-defrag": "0.3.8", "mixed-types": "0.3.8"}
#: Fixes of later defects.
TO_COME = ("swa-window-kept", "compact-then-decode", "compact-streams", "compact-swa")
FIXES = [each.id for each in JUDGED if each.kind == "fix" and each.id not in TO_COME]

pytestmark = pytest.mark.native


def run_side(side: str, variant, chosen: list[tuple[Scenario, Setting]]) -> tuple[Run, ...]:
    digest = variant.manifest.library_sha256
    tasks = [parallel_runs.RunTask(side, variant.folder, digest, one, how) for one, how in chosen]
    return tuple(parallel_runs.run_tasks(tasks).values())


@pytest.fixture(scope="module")
def pairs(stock, patched):
    chosen = [(each, setting) for each in JUDGED for setting in each.settings]
    runs = {
        "stock": run_side("stock", stock, chosen),
        "patched": run_side("patched", patched, chosen),
    }
    return pair_up(JUDGED, runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIXES if name not in CURED_SINCE])
def test_fix_fails_on_stock_and_passes_on_patched(pairs, patched, name: str) -> None:
    """Each setting that can run here is checked; a fix that cannot run is skipped."""
    known = series.load()
    if not any(name in known.definition(each).scenarios for each in patched.manifest.patches):
        pytest.skip("no patch of this release names it")
    mine = [pair for pair in pairs if pair.scenario == name and pair.stock.status != "skip"]
    if not mine:
        pytest.skip("cannot run here")
    for pair in mine:
        assert pair.stock.status == "fail", f"stock passes {name} [{pair.setting}]"
        assert pair.patched.status == "pass", f"{name} [{pair.setting}]: {pair.patched.message}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CURED_SINCE)
def test_scenario_fixed_upstream_passes_on_both_sides(pairs, name: str) -> None:
    """The test release has upstream's own fix, which the patch must not break."""
    for pair in (each for each in pairs if each.scenario == name):
        assert pair.stock.status == "pass", f"[{pair.setting}]: {pair.stock.message}"
        assert pair.patched.status == "pass", f"[{pair.setting}]: {pair.patched.message}"


@pytest.mark.parametrize("name", CURED_SINCE)
def test_scenario_fixed_upstream_fails_on_the_release_before(name: str) -> None:
    """If the last release with the defect is built, stock fails there and patched passes."""
    release = CURED_SINCE[name]
    sides = {side: variants.find(f"{release}+{side}") for side in ("stock", "patched")}
    if None in sides.values():
        pytest.skip(f"{release} is not built here")
    chosen = [(ALL[name], setting) for setting in ALL[name].settings]
    runs = {side: run_side(side, variant, chosen) for side, variant in sides.items()}
    for pair in pair_up([ALL[name]], runs):
        assert pair.stock.failure == "data", f"stock [{pair.setting}]: {pair.stock}"
        assert pair.patched.status == "pass", f"[{pair.setting}]: {pair.patched.message}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.id for each in JUDGED if each.kind == "guard"])
def test_guard_passes_on_patched(pairs, name: str) -> None:
    """Each setting that can run here passes."""
    for pair in pairs:
        if pair.scenario == name and pair.patched.status not in ("skip", "absent"):
            assert pair.patched.status == "pass", f"[{pair.setting}]: {pair.patched.message}"


@pytest.mark.slow
def test_verdict_of_the_test_release_is_needed(pairs) -> None:
    """The check of the test release returns `needed`."""
    assert decide(pairs).verdict is Verdict.NEEDED


@pytest.mark.slow
def test_repeated_run_has_the_same_outcome(patched) -> None:
    """Scenarios are deterministic: only the time differs."""
    with ScenarioRunner() as bench:
        for name in ("fragmented", "abort-after-defrag"):
            each = ALL[name]
            one = bench.run(patched.folder, each, each.settings[0])
            other = bench.run(patched.folder, each, each.settings[0])
            assert one.outcome == other.outcome
            assert one.pictures == other.pictures
            assert one.difference == other.difference
