"""Measure the cost that the patch adds to decodes with and without a defragmentation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import pyllamakv
from pyllamakv.errors import Untestable
from pyllamakv.scenarios import synthetic_models
from qa.bench import defrag_workloads
from qa.bench.contexts import opened
from qa.bench.defrag_workloads import CacheShape
from qa.bench.figure import Figure
from qa.bench.fragmentation import NEXT, Fragmenter
from qa.bench.measure import MINIMUM_PAIRS, Pairs, clock, interleave, interval
from qa.bench.rounds import complete

Tick = Callable[[], None]


def defragmenting_decodes(
    group: str, cache: CacheShape, tick: Tick, spec: str, pairs: int = MINIMUM_PAIRS
) -> Figure:
    """Compare a decode that finds no slot and defragments with one that need not.

    Both decode the same two tokens, the second after an explicit defragmentation.
    """
    mask = defrag_workloads.live("alternate", cache.cells)
    moving: list[float] = []
    with opened(spec, cache) as made:
        carver = Fragmenter(made)

        def decode() -> None:
            pos, seq = np.arange(2, dtype=np.int32), np.full(2, NEXT, dtype=np.int32)
            code = made.native.decode(made.handle, pos, pos, None, seq, None)
            if code:
                msg = f"the decode that should find room by defragmenting failed: {code}"
                raise Untestable(msg)

        def fragmented() -> float:
            carver.fragment(mask)
            before = made.counters
            seconds = clock(decode)
            counted = made.counters - before
            if counted.defrags != 1:
                msg = f"expected one defragmentation within the decode, not {counted.defrags}"
                raise Untestable(msg)
            moving.append(counted.ns / 1e9)
            return seconds

        def compact() -> float:
            carver.fragment(mask)
            complete(made, mask)
            return clock(decode)

        found = interleave(fragmented, compact, pairs=pairs, progress=tick)
    # The first result of interleave is not in its list.
    return _healed(group, cache, found, moving[1:])


def _healed(group: str, cache: CacheShape, found: Pairs, moving: list[float]) -> Figure:
    added = [a - b for a, b in zip(found.first, found.second, strict=True)]
    share = interval([a / b for a, b in zip(added, moving, strict=True)])
    own = statistics.median(moving) * 1e3
    return Figure(
        group,
        f"extra time of a decode that defragments, over the defragmentation: "
        f"{cache.shape}, {cache.cells} cells, alternate, {cache.setting.name}",
        f"{share.format()} x {own:.1f} ms",
        "1 x: no other cost",
        # The bound is on the added time; single decodes vary by more than this.
        share.low <= 1.05,
        f"the decode alone: {statistics.median(found.second) * 1e3:.1f} ms",
        f"{len(added)} interleaved pairs",
        {"fragmented": found.first, "compact": found.second, "defragmentation": moving},
    )


def ordinary_decodes(
    group: str,
    tick: Tick,
    release: str,
    pairs: int = 200,
    steps: int = 64,
) -> Figure:
    """Compare decodes on patched and stock that need no defragmentation."""
    with (
        pyllamakv.open(f"{release}+stock") as stock,
        pyllamakv.open(f"{release}+patched") as patched,
        stock.load_model(synthetic_models.tiny()) as stock_model,
        patched.load_model(synthetic_models.tiny()) as patched_model,
        stock_model.context(n_ctx=512) as stock_context,
        patched_model.context(n_ctx=512) as patched_context,
    ):
        found = interleave(
            partial(_steps, patched_context, steps),
            partial(_steps, stock_context, steps),
            pairs=pairs,
            progress=tick,
        )
    micro = statistics.median(found.second) / steps * 1e6
    return Figure(
        group,
        "decode without defragmentation, patched over stock",
        f"{found.ratio.format(3)} x",
        "1.0 or less within the interval",
        found.ratio.low <= 1.0,
        f"stock: {micro:.0f} us a token",
        f"{pairs} interleaved pairs of {steps} tokens, model of one layer",
        {"patched": found.first, "stock": found.second},
    )


def _steps(made: pyllamakv.Context, steps: int) -> float:
    made.clear()
    with made.sequence() as sequence:
        begin = time.perf_counter()
        for number in range(steps):
            made.step(sequence, number % 32)
        return time.perf_counter() - begin
