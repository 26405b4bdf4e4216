"""Compare a complete defragmentation with the alternatives on stock."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pyllamakv
from pyllamakv.errors import Untestable
from pyllamakv.runtime.memory_estimate import available_bytes
from qa.bench import defrag_workloads
from qa.bench.contexts import opened
from qa.bench.defrag_workloads import CacheShape
from qa.bench.figure import Figure
from qa.bench.fragmentation import ALL, Fragmenter
from qa.bench.measure import Pairs, clock, interleave
from qa.bench.rounds import check, complete

Tick = Callable[[], None]


def passes(group: str, cache: CacheShape, tick: Tick, release: str, pairs: int = 10) -> Figure:
    """Compare with stock's defragmentation, repeated until no cell moves."""
    mask = defrag_workloads.live("alternate", cache.cells)
    name = f"alternate cells, stock's passes over the patch: {_what(cache)}"
    reason = cache.skipped(available_bytes())
    if reason:
        return Figure(group, name, reason)
    with (
        opened(f"{release}+stock", cache) as stock_context,
        opened(f"{release}+patched", cache) as patched_context,
    ):
        stock_carver, patched_carver = Fragmenter(stock_context), Fragmenter(patched_context)

        def theirs() -> float:
            stock_carver.fragment(mask)
            seconds = 0.0
            while stock_context.kv.stats.used_max_p1 > mask.sum():
                report = stock_context.kv.defrag()
                if not report.cells:
                    break
                seconds += report.seconds
            check(stock_context, mask)
            return seconds

        def ours() -> float:
            patched_carver.fragment(mask)
            return complete(patched_context, mask).seconds

        return _figure(group, name, interleave(theirs, ours, pairs=pairs, progress=tick))


def saved(group: str, cache: CacheShape, tick: Tick, spec: str, pairs: int = 5) -> Figure:
    """Compare with saving, removing and restoring the sequence, which every library supports."""
    mask = defrag_workloads.live("alternate", cache.cells)
    name = f"alternate cells, save and restore over the patch: {_what(cache)}"
    reason = cache.skipped(available_bytes())
    if reason:
        return Figure(group, name, reason)
    with opened(spec, cache) as made:
        carver = Fragmenter(made)

        def theirs() -> float:
            carver.fragment(mask)
            seconds = clock(lambda: _restore(made))
            check(made, mask)
            return seconds

        def ours() -> float:
            carver.fragment(mask)
            return complete(made, mask).seconds

        return _figure(group, name, interleave(theirs, ours, pairs=pairs, progress=tick))


def _restore(made: pyllamakv.Context) -> None:
    native, handle = made.native, made.handle
    state = native.state_save(handle, ALL)
    native.seq_rm(handle, ALL, -1, -1)
    if native.state_load(handle, ALL, state) != len(state):
        msg = "the library refused to restore the sequence that it saved"
        raise Untestable(msg)


def _what(cache: CacheShape) -> str:
    return f"{cache.shape}, {cache.cells} cells, {cache.setting.name}"


def _figure(group: str, name: str, found: Pairs) -> Figure:
    return Figure(
        group,
        name,
        f"{found.ratio.format(1)} x {statistics.median(found.second) * 1e3:.1f} ms",
        how=f"{len(found.first)} interleaved pairs",
        data={"theirs": found.first, "ours": found.second},
    )
