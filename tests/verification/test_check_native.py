"""Test that each fix fails on stock and passes on patched, and that guards pass on patched."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllamakv.building import variant as variants
from pyllamakv.building.build import build_patched
from pyllamakv.errors import CommandFailed, KvError
from pyllamakv.patching import apply, series
from pyllamakv.patching.definition import Port
from pyllamakv.scenarios.runner import Run, ScenarioRunner
from pyllamakv.scenarios.scenario import Scenario, Setting
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.check import pair_up
from pyllamakv.verification.verdict import GOOD, Verdict, decide

RELEASE = "0.3.9"
DOCTORED = Path(__file__).resolve().parents[1] / "data" / "doctored"
ALL = discovery.discover()
#: Features belong to their own patches.
JUDGED = [each for each in ALL.values() if each.kind != "feature"]
#: Fixes of defects that upstream fixed earlier, and the last release with the defect.
CURED_SINCE = {"quantized-defrag": "0.3.8", "mixed-types": "0.3.8"}
#: Fixes of later defects.
TO_COME = ("swa-window-kept", "compact-then-decode", "compact-streams", "compact-swa")
FIXES = [each.id for each in JUDGED if each.kind == "fix" and each.id not in TO_COME]

pytestmark = pytest.mark.native


def shipped() -> Port:
    return series.load().definition("full-defrag").port(RELEASE)


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


@pytest.fixture
def building() -> Iterator:
    """Build a text in the release's shared build folder, and take the variant away again."""
    made = []

    def build(text: Port):
        release = spec_resolver.resolve(RELEASE)
        variant = build_patched(release, apply.apply(release, [text]))
        made.append(variant)
        return variant

    yield build
    for variant in made:
        shutil.rmtree(variant.folder, ignore_errors=True)


def verdict_of(stock, variant, chosen: list[tuple[Scenario, Setting]]) -> Verdict:
    """Return what check would say about a variant."""
    runs = {
        "stock": run_side("stock", stock, chosen),
        "patched": run_side("patched", variant, chosen),
    }
    return decide(pair_up([each for each, _ in chosen], runs)).verdict


def caught_by(path: Path) -> Scenario:
    """Return the scenario that a doctored patch says must catch it."""
    found = re.search(r"^Scenario: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{path} names no scenario"
    return ALL[found.group(1)]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(DOCTORED.glob("*.patch")), ids=lambda path: path.stem)
def test_a_doctored_patch_is_caught(stock, building, path: Path) -> None:
    """A patch with one deliberate fault applies and builds, and its scenario fails."""
    scenario = caught_by(path)
    chosen = [(scenario, setting) for setting in scenario.settings]
    found = verdict_of(stock, building(Port.from_file(path)), chosen)
    assert found in {Verdict.HARMFUL, Verdict.INEFFECTIVE}


def test_every_guard_has_a_doctored_patch() -> None:
    """A guard that nothing can break guards nothing."""
    if not DOCTORED.is_dir():
        pytest.skip("no doctored patches here")
    caught = {caught_by(path).id for path in DOCTORED.glob("*.patch")}
    # Those of no patch are shown to fail by test_routine.
    own = series.load().definition("full-defrag").scenarios
    assert {each.id for each in JUDGED if each.kind == "guard" and each.id in own} <= caught


def hunks() -> list[tuple[str, int]]:
    try:
        text = shipped()
    except KvError:
        return []
    # One that only takes away leaves a declaration that nobody uses, which no workload can tell.
    return [
        (file.path, number)
        for file in text.patch.files
        for number, hunk in enumerate(file.hunks, start=1)
        if hunk.added
    ]


def breaks_the_build(text: Port, tmp_path: Path, objects: Path) -> bool:
    """Compile what the patch changes, without making code: an error here is one in the build.

    A header that does not fit would cost a whole build of everything behind it.
    """
    release = spec_resolver.resolve(RELEASE)
    tree = tmp_path / "tree"
    open_store().export(apply.apply(release, [text]).tree, tree)
    for entry in json.loads((objects / "compile_commands.json").read_text(encoding="utf-8")):
        source = Path(entry["file"])
        if source.name not in ("llama-kv-cache.cpp", "llama-context.cpp"):
            continue
        root = str(source.parent.parent)
        words = shlex.split(entry["command"].replace(root, str(tree)))
        if Path(words[0]).name == "ccache":
            del words[0]
        words[words.index("-o") + 1] = os.devnull
        words += ["-fsyntax-only"]
        done = subprocess.run(words, cwd=entry["directory"], capture_output=True, check=False)
        if done.returncode:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("file", "hunk"), hunks(), ids=lambda value: str(value).split("/")[-1])
def test_a_series_without_one_hunk_is_red(
    stock, building, tmp_path: Path, file: str, hunk: int
) -> None:
    """Without any one hunk, the patch does not build, or a scenario fails."""
    text = shipped().without(file, hunk)
    objects = variants.request(f"{RELEASE}+stock").objects
    if (objects / "compile_commands.json").is_file() and breaks_the_build(text, tmp_path, objects):
        return
    try:
        variant = building(text)
    except CommandFailed as error:
        assert error.first_error
        return
    first = [(each, each.settings[0]) for each in JUDGED]
    assert verdict_of(stock, variant, first) not in GOOD
