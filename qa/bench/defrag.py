"""Measure complete defragmentations and their targets in a few minutes."""

from __future__ import annotations

from collections.abc import Callable

from pyllamakv.errors import KvError
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import contexts, defrag_figures, ordinary_decodes
from qa.bench.defrag_workloads import PATTERNS, SETTINGS, CacheShape
from qa.bench.figure import Figure

GROUP = "A complete defragmentation"
Tick = Callable[[], None]

FLASH, NONE, Q8, Q4 = SETTINGS

#: The workloads of the targets: alternate cells at several sizes, and every pattern at one size.
PLAN: tuple[tuple[CacheShape, tuple[str, ...]], ...] = (
    *((CacheShape("1B", each, 4096), PATTERNS[:1]) for each in (FLASH, NONE)),
    *((CacheShape("1B", each, 16384), PATTERNS) for each in (FLASH, NONE, Q8, Q4)),
    *((CacheShape("1B", each, 65536), PATTERNS[:1]) for each in (FLASH, NONE)),
    *((CacheShape("8B", each, 16384), PATTERNS[:1]) for each in (FLASH, NONE)),
)

#: Seconds for the published algorithm in each workload: at least 30 pairs if they fit.
BUDGET = 15.0

#: A release that accepts scattered cells, and the workloads that are measured there.
LATER = "0.3.36"
LATER_PLAN = tuple((CacheShape("1B", each, 16384), PATTERNS[:1]) for each in (FLASH, NONE))


def figures(tick: Tick, release: str = TEST_RELEASE) -> list[Figure]:
    """Measure the plan, and decodes that need no defragmentation."""
    spec = f"{release}+patched"
    found = contexts.measure(PLAN, tick, spec=spec, budget=BUDGET)
    return [
        *defrag_figures.targets(GROUP, found),
        ordinary_decodes.figure(GROUP, tick, release),
        *later(tick),
    ]


def later(tick: Tick, release: str = LATER) -> list[Figure]:
    """Measure some workloads on a release that `compaction` defragments, or report why not."""
    group, spec = f"{GROUP}, {release}", f"{release}+patched"
    try:
        found = contexts.measure(LATER_PLAN, tick, spec=spec, budget=BUDGET / 2)
    except KvError as error:
        reason, _, _ = str(error).partition(";")
        return [Figure(group, spec, f"skipped: {reason}")]
    return defrag_figures.targets(group, found)
