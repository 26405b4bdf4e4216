"""Measure complete defragmentations of every size, pattern, setting and shape."""

from __future__ import annotations

from collections.abc import Callable

from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import contexts, defrag_figures
from qa.bench.defrag_workloads import PATTERNS, caches
from qa.bench.figure import Figure

GROUP = "Complete defragmentations of every kind"
Tick = Callable[[], None]

#: Seconds for the published algorithm in each of the 160 workloads; at least five pairs.
BUDGET = 4.0


def figures(tick: Tick, release: str = TEST_RELEASE) -> list[Figure]:
    """Measure the whole grid; workloads that do not fit in memory are skipped."""
    plan = [(cache, PATTERNS) for cache in caches()]
    found = contexts.measure(plan, tick, spec=f"{release}+patched", budget=BUDGET)
    return [*defrag_figures.targets(GROUP, found), *defrag_figures.table(GROUP, found)]
