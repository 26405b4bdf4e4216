"""Measure one workload: ours, the published algorithm, and the limits, in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyllamakv.errors import Untestable
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.kv import DefragReport
from qa.bench import defrag_workloads, memory_bandwidth
from qa.bench.defrag_workloads import CacheShape, Live
from qa.bench.fragmentation import Fragmenter
from qa.bench.measure import MINIMUM_PAIRS, Interval, interval
from qa.bench.memory_bandwidth import MemoryBandwidth

#: The mover of the patch that does what the published algorithm does: graphs of copies of rows.
VARIABLE, PUBLISHED = "LLAMA_KV_DEFRAG_MOVER", "graph"

#: Pairs that even the slowest workload gets.
LEAST = 5

Tick = Callable[[], None]


@dataclass
class Measured:
    """Hold what was measured of one workload; seconds per round, in the order of the rounds.

    The published algorithm is slow: ``published`` may have fewer rounds than the others, the first
    ones. ``skipped`` says why there is nothing. ``plan`` is a part of ours, and ``scratch`` are the
    most bytes beyond the cache that ours needed; empty and 0 where the build does not count them.
    """

    cache: CacheShape
    pattern: str
    skipped: str = ""
    moves: int = 0
    least_moves: int = 0
    bytes: int = 0
    ours: list[float] = field(default_factory=list)
    strided: list[float] = field(default_factory=list)
    straight: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    scratch: int = 0

    @property
    def over_strided(self) -> Interval:
        """Return how many times as long as the strided copy ours takes."""
        return ratio(self.ours, self.strided)

    @property
    def over_straight(self) -> Interval:
        """Return how many times as long as memcpy ours takes."""
        return ratio(self.ours, self.straight)

    @property
    def faster(self) -> Interval:
        """Return how many times as long as ours the published algorithm takes."""
        return ratio(self.published, self.ours)

    def to_json(self) -> dict[str, Any]:
        """Return the raw numbers."""
        if self.skipped:
            return {"skipped": self.skipped}
        counts = ("moves", "least_moves", "bytes", "scratch")
        seconds = ("ours", "strided", "straight", "published", "plan")
        rounded = {name: [round(x, 7) for x in getattr(self, name)] for name in seconds}
        return {**{name: getattr(self, name) for name in counts}, **rounded}


def ratio(first: list[float], second: list[float]) -> Interval:
    """Return first over second, round by round, as far as both go."""
    return interval([a / b for a, b in zip(first, second, strict=False)])


class DefragBenchmark:
    """Hold what a cache is measured with: its context, and a block of memory like it."""

    def __init__(
        self,
        cache: CacheShape,
        context: Context,
        block: MemoryBandwidth,
        *,
        budget: float,
        tick: Tick,
    ) -> None:
        self.cache, self.context, self.block = cache, context, block
        self.budget, self.tick = budget, tick
        self.carver = Fragmenter(context)

    def measure(self, pattern: str) -> Measured:
        """Measure a pattern: thirty rounds where they fit into twice the budget, at least five.

        The published algorithm is in as many of them as fit into the budget once.
        """
        mask = defrag_workloads.live(pattern, self.cache.cells)
        found = Measured(self.cache, pattern, least_moves=defrag_workloads.least_moves(mask))
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
            # The published algorithm stays away once it did: its rounds are the first ones.
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
        # Not timed: the first one pays for what is needed once. No other mover has been there yet.
        found.scratch = complete(self.context, mask).scratch or 0
        moves = before.moves_to(self.context.kv.snapshot())
        runs = memory_bandwidth.table(moves)
        found.moves, found.bytes = len(runs), moves.cells * self.cache.cell
        return runs

    def _ours(self, found: Measured, mask: Live) -> None:
        self.carver.fragment(mask)
        report = complete(self.context, mask)
        found.ours.append(report.seconds)
        if report.plan_seconds is not None:
            found.plan.append(report.plan_seconds)

    def _published(self, found: Measured, mask: Live) -> None:
        self.carver.fragment(mask)
        with mover(PUBLISHED):
            found.published.append(complete(self.context, mask).seconds)

    def _memory(self, found: Measured, runs: memory_bandwidth.Table) -> None:
        found.strided.append(self.block.strided(runs))
        found.straight.append(self.block.straight(found.bytes))


@contextmanager
def mover(name: str) -> Iterator[None]:
    """Let defragmentations of this process choose a mover of the patch."""
    kept = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if kept is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = kept


def complete(context: Context, mask: Live) -> DefragReport:
    """Defragment; raises Untestable when the live cells do not lie together afterwards."""
    report = context.kv.defrag(fallback=False)
    check(context, mask)
    return report


def check(context: Context, mask: Live) -> None:
    """Raise Untestable unless all live cells, and no others, lie at the start of the cache."""
    stats, used = context.kv.stats, int(mask.sum())
    if (stats.used, stats.used_max_p1) != (used, used):
        msg = f"of {used} live cells, {stats.used} lie below {stats.used_max_p1} after all moves"
        raise Untestable(msg)
