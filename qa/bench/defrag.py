"""Measure complete defragmentations and their targets in a few minutes."""

from __future__ import annotations

from collections.abc import Callable

from pyllamakv.errors import KvError
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import contexts, defrag_alternatives, defrag_figures, defrag_in_decode, defrag_options
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
    """Measure the plan, decodes that defragment, and decodes that do not."""
    spec = f"{release}+patched"
    found = contexts.measure(PLAN, tick, spec=spec, budget=BUDGET)
    beside = [CacheShape("1B", each, 16384) for each in (FLASH, NONE)]
    return [
        *defrag_figures.targets(GROUP, found),
        *(defrag_alternatives.passes(GROUP, cache, tick, release) for cache in beside),
        *(defrag_in_decode.defragmenting_decodes(GROUP, cache, tick, spec) for cache in beside),
        defrag_in_decode.ordinary_decodes(GROUP, tick, release),
        *(
            figure
            for cache in beside
            for figure in defrag_options.figures(GROUP, cache, tick, spec)
        ),
        *defrag_figures.table(GROUP, found),
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
    return [
        *defrag_figures.targets(group, found),
        *(defrag_alternatives.saved(group, cache, tick, spec) for cache, _ in LATER_PLAN),
        *defrag_figures.table(group, found),
    ]
