"""Measure complete defragmentations: what was promised of them, in a few minutes."""

from __future__ import annotations

from collections.abc import Callable

from pyllamakv.errors import KvError
from pyllamakv.source.releases import DEFAULT_RELEASE
from qa.bench import choices, indecode, peers, stands, summary
from qa.bench.figure import Figure
from qa.bench.workloads import PATTERNS, SETTINGS, Cache

GROUP = "A complete defragmentation"
Tick = Callable[[], None]

FLASH, NONE, Q8, Q4 = SETTINGS

#: What is promised of alternate cells at several sizes, every pattern at one.
PLAN: tuple[tuple[Cache, tuple[str, ...]], ...] = (
    *((Cache("1B", each, 4096), PATTERNS[:1]) for each in (FLASH, NONE)),
    *((Cache("1B", each, 16384), PATTERNS) for each in (FLASH, NONE, Q8, Q4)),
    *((Cache("1B", each, 65536), PATTERNS[:1]) for each in (FLASH, NONE)),
    *((Cache("8B", each, 16384), PATTERNS[:1]) for each in (FLASH, NONE)),
)

#: Seconds for the published algorithm in each: at least 30 pairs where they fit.
BUDGET = 15.0

#: A release whose slots need not lie together, and what is measured there.
LATER = "0.3.36"
LATER_PLAN = tuple((Cache("1B", each, 16384), PATTERNS[:1]) for each in (FLASH, NONE))


def figures(tick: Tick, release: str = DEFAULT_RELEASE) -> list[Figure]:
    """Measure the plan, decodes that defragment, and decodes that do not."""
    spec = f"{release}+patched"
    found = stands.measure(PLAN, tick, spec=spec, budget=BUDGET)
    beside = [Cache("1B", each, 16384) for each in (FLASH, NONE)]
    return [
        *summary.targets(GROUP, found),
        *(peers.passes(GROUP, cache, tick, release) for cache in beside),
        *(indecode.healing(GROUP, cache, tick, spec) for cache in beside),
        indecode.undisturbed(GROUP, tick, release),
        *(figure for cache in beside for figure in choices.figures(GROUP, cache, tick, spec)),
        *summary.table(GROUP, found),
        *later(tick),
    ]


def later(tick: Tick, release: str = LATER) -> list[Figure]:
    """Measure a few where `compaction` defragments, or say why not."""
    group, spec = f"{GROUP}, {release}", f"{release}+patched"
    try:
        found = stands.measure(LATER_PLAN, tick, spec=spec, budget=BUDGET / 2)
    except KvError as error:
        reason, _, _ = str(error).partition(";")
        return [Figure(group, spec, f"skipped: {reason}")]
    return [
        *summary.targets(group, found),
        *(peers.saved(group, cache, tick, spec) for cache, _ in LATER_PLAN),
        *summary.table(group, found),
    ]
