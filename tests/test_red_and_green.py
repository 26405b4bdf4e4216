"""Every cure is red on stock and green on patched, and every hunk of the patch is needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllamakv.building.build import build_patched
from pyllamakv.errors import BuildError, CommandFailed, PatchError
from pyllamakv.harness import running, scenario
from pyllamakv.harness.check import pair_up
from pyllamakv.harness.lab import Bench, Run
from pyllamakv.harness.scenario import Scenario, Setting
from pyllamakv.harness.verdict import GOOD, Verdict, judge
from pyllamakv.patching import apply, series
from pyllamakv.patching.definition import PatchText
from pyllamakv.source import releases

RELEASE = "0.3.9"
DOCTORED = Path(__file__).resolve().parent / "data" / "doctored"
ALL = scenario.discover()
#: Features belong to patches of their own.
JUDGED = [each for each in ALL.values() if each.kind != "feature"]

pytestmark = [pytest.mark.native, pytest.mark.slow]


def shipped() -> PatchText:
    return series.load().definition("full-defrag").text(RELEASE)


def run_side(side: str, variant, chosen: list[tuple[Scenario, Setting]]) -> tuple[Run, ...]:
    digest = variant.manifest.library_sha256
    tasks = [running.Task(side, variant.folder, digest, one, how) for one, how in chosen]
    return tuple(running.run_tasks(tasks).values())


@pytest.fixture(scope="module")
def pairs(stock, patched):
    chosen = [(each, setting) for each in JUDGED for setting in each.settings]
    runs = {
        "stock": run_side("stock", stock, chosen),
        "patched": run_side("patched", patched, chosen),
    }
    return pair_up(JUDGED, runs)


@pytest.mark.parametrize("name", [each.id for each in JUDGED if each.kind == "cure"])
def test_a_cure_is_red_on_stock_and_green_on_patched(pairs, name: str) -> None:
    """In every setting that can run here; a cure that cannot run at all is skipped."""
    mine = [pair for pair in pairs if pair.scenario == name and pair.stock.status != "skip"]
    if not mine:
        pytest.skip("cannot run here")
    for pair in mine:
        assert pair.stock.status == "fail", f"stock passes {name} [{pair.setting}]"
        assert pair.patched.status == "pass", f"{name} [{pair.setting}]: {pair.patched.message}"


@pytest.mark.parametrize("name", [each.id for each in JUDGED if each.kind == "guard"])
def test_a_guard_holds_on_patched(pairs, name: str) -> None:
    """In every setting that can run here."""
    for pair in pairs:
        if pair.scenario == name and pair.patched.status != "skip":
            assert pair.patched.status == "pass", f"[{pair.setting}]: {pair.patched.message}"


def test_the_release_needs_the_patch(pairs) -> None:
    """The default release's verdict is needed."""
    assert judge(pairs).verdict is Verdict.NEEDED


def test_the_same_run_twice_gives_the_same(patched) -> None:
    """Scenarios are deterministic: nothing but the time differs."""
    with Bench() as bench:
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

    def build(text: PatchText):
        release = releases.resolve(RELEASE)
        variant = build_patched(release, apply.apply(release, [text]))
        made.append(variant)
        return variant

    yield build
    for variant in made:
        shutil.rmtree(variant.folder, ignore_errors=True)


def verdict_of(text: PatchText, stock, building, chosen: list[Scenario]) -> str:
    """Return what check would say about a text, each scenario in its first setting."""
    try:
        variant = building(text)
    except PatchError:
        return "broken-apply"
    except CommandFailed as error:
        assert error.first_error or str(error)
        return "broken-build"
    except BuildError as error:
        pytest.fail(f"the build failed for another reason: {error}")
    first = [(each, each.settings[0]) for each in chosen]
    runs = {
        "stock": run_side("stock", stock, first),
        "patched": run_side("patched", variant, first),
    }
    return str(judge(pair_up(chosen, runs)).verdict)


def hunks() -> list[tuple[str, int]]:
    try:
        text = shipped()
    except Exception:
        return []
    return [
        (file.path, number)
        for file in text.patch.files
        for number in range(1, len(file.hunks) + 1)
    ]


@pytest.mark.parametrize(("file", "hunk"), hunks(), ids=lambda value: str(value).split("/")[-1])
def test_a_series_without_one_hunk_is_red(stock, patched, building, file: str, hunk: int) -> None:
    """Whatever hunk a rebase loses, check says so: it does not build, or a scenario fails."""
    found = verdict_of(shipped().without(file, hunk), stock, building, JUDGED)
    assert found not in {str(verdict) for verdict in GOOD}
