"""Test that leak tests find planted leaks of memory, descriptors and threads, and no others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyllamakv import open_variant
from pyllamakv.errors import HarnessError
from qa import leaks, summary
from qa.entry import StressOptions
from qa.leaks import LeakWorkload, Slope

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

COUNTS = list(range(0, 5000, 100))


def noisy(per_operation: float) -> list[float]:
    """Return sizes that grow, with noise of some pages."""
    chance = random.Random(1)
    return [per_operation * count + chance.gauss(0, 8192) for count in COUNTS]


def test_a_leak_is_distinguished_from_noise_and_steps() -> None:
    """Noise, a pool that grows once, and memory that is released are not leaks."""
    leak = Slope.of(COUNTS, noisy(100.0))
    assert 90 < leak.value < 110
    assert leak.noise < 10
    assert leak.exceeds(64)
    assert not leak.exceeds(128)
    assert not Slope.of(COUNTS, noisy(0.0)).exceeds(0.0)
    assert not Slope.of(COUNTS, noisy(-100.0)).exceeds(1.0)
    step = [float(count > 2000) * (1 << 20) for count in COUNTS]
    assert Slope.of(COUNTS, step).value == 0
    assert str(Slope(1.23456, 0.5)) == "1.23 ± 0.5 B"


@pytest.mark.parametrize("where", [1000, 2500, 4900])
def test_one_step_of_memory_is_no_leak(where: int) -> None:
    """A table that doubles once is a pool."""
    assert Slope.of(COUNTS, [float(n > where) * 540_000 for n in COUNTS]).value == 0


def test_many_steps_are_a_slope_and_so_is_a_large_one() -> None:
    """Continued growth is a leak, however slow; so is a single growth beyond a pool's size."""
    assert Slope.of(COUNTS, [float(n // 1000) * 540_000 for n in COUNTS]).exceeds(64)
    assert Slope.of(COUNTS, [float(n > 2500) * 5_400_000 + n for n in COUNTS]).value > 1


def judged(work: str, target: int = 50_000) -> tuple[str, ...]:
    """Run one of the planted kinds of work repeatedly; return the defects."""
    kind = LeakWorkload(f"fakes.leaking_workloads:{work}", target, 64)
    samples = leaks.run_workload(kind, Path("/nowhere"), 2.0)
    entry = leaks.evaluate(work, kind, samples, 1)
    assert int(entry.row["operations"].replace(",", "")) == samples[-1]["count"] <= target + 50
    return entry.defects


@pytest.mark.slow
def test_freed_memory_has_no_slope() -> None:
    """Memory that is allocated and freed has no slope."""
    assert judged("steady") == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("growing", ("heap memory grows by 4.", "resident memory grows by 4.")),
        ("mappings", ("maps grow from",)),
        ("descriptors", ("fds grow from",)),
        ("threads", ("threads grow from",)),
    ],
)
def test_planted_leaks_are_named(work: str, words: tuple[str, ...]) -> None:
    """The report of each leak names its kind."""
    found = judged(work)
    assert all(any(word in defect for defect in found) for word in words), found


def test_a_failed_workload_is_a_defect() -> None:
    """A workload that stopped early proves nothing."""
    with pytest.raises(HarnessError, match="ValueError: broken"):
        judged("breaking")


def test_too_few_samples_prove_nothing() -> None:
    """Any line fits two points."""
    sample = {"heap": 1, "resident": 1, "maps": 1, "fds": 1, "threads": 1}
    kind = LeakWorkload("x", 10, 1.0)
    (defect,) = leaks.evaluate("x", kind, [{"count": n, **sample} for n in (1, 2)], 1).defects
    assert "too few samples" in defect


def test_single_growth_is_not_a_leak() -> None:
    """A short run may touch pages for the first time; less is allowed for heap and mappings."""

    def grown(what: str, size: int) -> tuple[str, ...]:
        flat = {"heap": 0, "resident": 0, "maps": 9, "fds": 1, "threads": 1}
        samples = [{**flat, "count": n, what: n * size} for n in range(1, 101)]
        return leaks.evaluate("x", LeakWorkload("x", 100, 2.0), samples, 1).defects

    assert grown("resident", 10_000) == grown("heap", 500) == ()
    assert "resident memory grows" in grown("resident", 20_000)[0]
    assert "heap memory grows" in grown("heap", 1500)[0]
    assert "maps grow from 10 to 100" in grown("maps", 1)[0]


def flat(count: int) -> list[dict[str, int]]:
    """Return a hundred samples of the given number of operations without a leak."""
    same = {"heap": 1, "resident": 1, "maps": 1, "fds": 1, "threads": 1}
    return [{**same, "count": max(1, count * n // 100)} for n in range(1, 101)]


def test_the_bound_that_is_shown_is_the_one_that_holds() -> None:
    """A single growth is divided by the operations, until the bound of the kind is larger."""
    kind = LeakWorkload("x", 10, 512)
    rows = [leaks.evaluate("x", kind, flat(count), 1).row for count in (100, 10_000)]
    assert [row["heap bound"] for row in rows] == ["1,311 B", "512 B"]
    assert [row["resident bound"] for row in rows] == ["10,486 B", "512 B"]


def test_few_operations_decide_nothing() -> None:
    """The limit for twenty workers is 50 KB each, which their row reports with real leaks."""
    kind = LeakWorkload("x", 10, 512)
    few, enough = (leaks.evaluate("x", kind, flat(count), 1) for count in (99, 100))
    assert few.passed and "| too few operations |" in summary.table([few])
    assert "| none |" in summary.table([enough])
    lost = [each | {"fds": n} for n, each in enumerate(flat(99))]
    text = summary.table([leaks.evaluate("x", kind, lost, 1)])
    assert "fds grow from" in text and "too few" not in text


def test_an_uncounted_heap_is_ignored() -> None:
    """Before glibc 2.33 it is not reported, and an absent count never grows."""
    blind = [each | {"heap": 0} for each in flat(100)]
    entry = leaks.evaluate("x", LeakWorkload("x", 10, 512), blind, 1)
    assert entry.passed and entry.skip_reason == "this libc does not count the heap"


@pytest.mark.slow
def test_work_that_breaks_is_a_defect_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named kinds run, and those without a library need no build."""
    assert leaks.entries(StressOptions(only=("no such kind",)), lambda _: None) == []
    kinds = {
        name: LeakWorkload(f"fakes.leaking_workloads:{name}", 5000, 64)
        for name in ("breaking", "steady")
    }
    monkeypatch.setattr(leaks, "KINDS", kinds)
    monkeypatch.setattr(open_variant, "find_built", lambda _: Path("/nowhere"))
    broken, steady = leaks.entries(StressOptions(seconds=4.0), lambda _: None)
    assert "breaking ended with status 1" in broken.defects[0]
    assert "ValueError: broken" in broken.defects[0] and str(Path.cwd()) not in broken.defects[0]
    assert steady.passed


@pytest.mark.slow
@pytest.mark.native
def test_leak_workloads_keep_descriptors_and_threads(patched: Variant) -> None:
    """Each kind of work runs some rounds, with constant numbers of descriptors and threads."""
    for entry in leaks.entries(StressOptions(seconds=7.0), lambda _: None):
        assert entry.row["operations"] != "0"
        assert not [each for each in entry.defects if "fds" in each or "threads" in each]
