"""Measure complete defragmentations of every size, pattern, setting and shape."""

from __future__ import annotations

from collections.abc import Callable

from pyllamakv.source.releases import DEFAULT_RELEASE
from qa.bench import stands, summary
from qa.bench.figure import Figure
from qa.bench.workloads import PATTERNS, caches

GROUP = "Complete defragmentations of every kind"
Tick = Callable[[], None]

#: Seconds for the published algorithm in each of the 160 workloads; five pairs at least.
BUDGET = 4.0


def figures(tick: Tick, release: str = DEFAULT_RELEASE) -> list[Figure]:
    """Measure the whole grid, as far as it fits into memory."""
    plan = [(cache, PATTERNS) for cache in caches()]
    found = stands.measure(plan, tick, spec=f"{release}+patched", budget=BUDGET)
    return [*summary.targets(GROUP, found), *summary.table(GROUP, found)]
