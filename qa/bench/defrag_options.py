"""Compare the options of a context for its defragmentations: plan, and number of threads."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyllamakv
from pyllamakv.runtime.kv import DefragReport
from pyllamakv.runtime.memory_estimate import available_bytes
from qa.bench import defrag_workloads
from qa.bench.contexts import opened
from qa.bench.defrag_workloads import CacheShape, Live
from qa.bench.figure import Figure
from qa.bench.fragmentation import Fragmenter
from qa.bench.measure import interleave
from qa.bench.rounds import complete

Tick = Callable[[], None]

#: The patterns for each option: holes everywhere, and long runs.
PATTERNS = ("alternate", "random 50 %", "runs of 16")


def figures(group: str, cache: CacheShape, tick: Tick, spec: str) -> Iterator[Figure]:
    """Yield the figures of both options in one cache."""
    for pattern in PATTERNS:
        yield _compare(group, cache, pattern, tick, spec, "ordered plan over fewest moves",
                       {"defrag_plan": "ordered"}, {})  # fmt: skip
    processors = len(os.sched_getaffinity(0))
    if processors > 1:
        yield _compare(group, cache, PATTERNS[0], tick, spec, "two threads over one",
                       {"defrag_threads": 2}, {"defrag_threads": 1})  # fmt: skip


def _compare(
    group: str,
    cache: CacheShape,
    pattern: str,
    tick: Tick,
    spec: str,
    choice: str,
    other: dict[str, Any],
    usual: dict[str, Any],
) -> Figure:
    name = f"{choice}: {cache.shape}, {cache.cells} cells, {pattern}, {cache.setting.name}"
    reason = cache.skipped(available_bytes())
    if reason:
        return Figure(group, name, reason)
    mask = defrag_workloads.live(pattern, cache.cells)
    with opened(spec, cache, **other) as first, opened(spec, cache, **usual) as second:
        one, two = OptionRunner(first, mask), OptionRunner(second, mask)
        found = interleave(one.run, two.run, progress=tick)
    milli = statistics.median(found.second) * 1e3
    return Figure(
        group,
        name,
        f"{found.ratio.format()} x {milli:.1f} ms",
        limit=f"cells moved: {one.cells} and {two.cells}",
        how=f"{len(found.first)} interleaved pairs",
        data={"first": found.first, "second": found.second},
    )


class OptionRunner:
    """One of the two compared contexts."""

    def __init__(self, context: pyllamakv.Context, mask: Live) -> None:
        carver = Fragmenter(context)
        self.cells: int | None = None
        self._carve = partial(carver.fragment, mask)
        self._complete: Callable[[], DefragReport] = partial(complete, context, mask)

    def run(self) -> float:
        """Create the pattern, and return the seconds of its defragmentation."""
        self._carve()
        report = self._complete()
        self.cells = report.cells
        return report.seconds
