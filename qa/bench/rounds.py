"""Measure one workload: ours, the published algorithm, and the limits, alternately."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pyllamakv.errors import Untestable
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.kv import DefragReport
from qa.bench import defrag_workloads, memory_bandwidth
from qa.bench.defrag_workloads import CacheShape, Live
from qa.bench.fragmentation import Fragmenter
from qa.bench.measure import MINIMUM_PAIRS, Interval, interval
from qa.bench.memory_bandwidth import MemoryBandwidth

#: The mover of the patch with the published algorithm: graphs that copy rows.
PUBLISHED = "graph"

#: Minimum number of pairs, also for the slowest workload.
LEAST = 5

Tick = Callable[[], None]


@dataclass
class Measured:
    """The measurements of one workload; seconds per round, in the order of the rounds.

    The published algorithm is slow: ``published`` may have fewer rounds than the others, the first
    ones. ``skipped`` is the reason if nothing was measured. ``plan`` is a part of ours, empty if
    the build does not measure it.
    """

    cache: CacheShape
    pattern: str
    skipped: str = ""
    bytes: int = 0
    ours: list[float] = field(default_factory=list)
    strided: list[float] = field(default_factory=list)
    straight: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)

    @property
    def over_strided(self) -> Interval:
        """Return the ratio of our time to that of a strided copy."""
        return ratio(self.ours, self.strided)

    @property
    def over_straight(self) -> Interval:
        """Return the ratio of our time to that of memcpy."""
        return ratio(self.ours, self.straight)

    @property
    def faster(self) -> Interval:
        """Return the ratio of the published algorithm's time to ours."""
        return ratio(self.published, self.ours)


def ratio(first: list[float], second: list[float]) -> Interval:
    """Return first over second, round by round, as far as both go."""
    return interval([a / b for a, b in zip(first, second, strict=False)])


class DefragBenchmark:
    """The objects of a measurement: two contexts, and a memory block of the size of a cache.

    ``published`` is a context with the mover `PUBLISHED`. A process reads the environment variable
    of the mover only once, so it cannot select the mover of a round.
    """

    def __init__(
        self,
        cache: CacheShape,
        context: Context,
        published: Context,
        block: MemoryBandwidth,
        *,
        budget: float,
        tick: Tick,
    ) -> None:
        self.cache, self.context, self.published, self.block = cache, context, published, block
        self.budget, self.tick = budget, tick
        self.carver, self.published_carver = Fragmenter(context), Fragmenter(published)

    def measure(self, pattern: str) -> Measured:
        """Measure a pattern: thirty rounds if they fit into twice the budget, at least five.

        The published algorithm takes part in as many of them as fit into the budget once.
        """
        mask = defrag_workloads.live(pattern, self.cache.cells)
        found = Measured(self.cache, pattern)
        runs = self._moves(found, mask)
        steps = (
            partial(self._ours, found, mask),
            partial(self._memory, found, runs),
            partial(self._published, found, mask),
        )
        begin = time.perf_counter()
        for number in range(MINIMUM_PAIRS):
            spent = time.perf_counter() - begin
            if number >= LEAST and spent > 2 * self.budget:
                break
            # Once the published algorithm is left out, it stays out: its rounds are the first ones.
            all_three = number < LEAST or (
                spent < self.budget and len(found.published) == len(found.ours)
            )
            now = steps if all_three else steps[:2]
            for step in reversed(now) if number % 2 else now:
                step()
            self.tick()
        return found

    def _moves(self, found: Measured, mask: Live) -> memory_bandwidth.Table:
        self.carver.fragment(mask)
        before = self.context.kv.snapshot()
        # Not timed: the first defragmentation includes one-time initialization.
        complete(self.context, mask)
        self.published_carver.fragment(mask)
        complete(self.published, mask)
        moves = before.moves_to(self.context.kv.snapshot())
        found.bytes = moves.cells * self.cache.cell
        return memory_bandwidth.table(moves)

    def _ours(self, found: Measured, mask: Live) -> None:
        self.carver.fragment(mask)
        report = complete(self.context, mask)
        found.ours.append(report.seconds)
        if report.plan_seconds is not None:
            found.plan.append(report.plan_seconds)

    def _published(self, found: Measured, mask: Live) -> None:
        self.published_carver.fragment(mask)
        found.published.append(complete(self.published, mask).seconds)

    def _memory(self, found: Measured, runs: memory_bandwidth.Table) -> None:
        found.strided.append(self.block.strided(runs))
        found.straight.append(self.block.straight(found.bytes))


def complete(context: Context, mask: Live) -> DefragReport:
    """Defragment. Raises Untestable if the live cells are not contiguous afterwards."""
    report = context.kv.defrag(fallback=False)
    check(context, mask)
    return report


def check(context: Context, mask: Live) -> None:
    """Raise Untestable unless exactly the live cells are at the start of the cache."""
    stats, used = context.kv.stats, int(mask.sum())
    if (stats.used, stats.used_max_p1) != (used, used):
        msg = f"of {used} live cells, {stats.used} lie below {stats.used_max_p1} after all moves"
        raise Untestable(msg)
