"""Compare the threshold policy with `never` in workloads that favour either."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyllamakv
from pyllamakv.home import home
from pyllamakv.scenarios import architectures, synthetic_models
from qa.bench import sparse
from qa.bench.figure import Figure
from qa.bench.measure import MINIMUM_PAIRS, Interval, interleave

GROUP = "Policies"
Tick = Callable[[], None]
Workload = Callable[[pyllamakv.Context, sparse.States], float]

CELLS = 8192


def long_chat(context: pyllamakv.Context, saved: sparse.States) -> float:
    """Continue the one sequence that stayed at the end of the cache."""
    return _steps(context, sparse.scatter(context, saved), 24)


def short_answer(context: pyllamakv.Context, saved: sparse.States) -> float:
    """Decode a few tokens there, too few to repay a move, and end."""
    return _steps(context, sparse.scatter(context, saved), 3)


def compact(context: pyllamakv.Context, saved: sparse.States) -> float:
    """Decode in a compact cache, where a move cannot help."""
    context.clear()
    live = context.sequence()
    live.restore(saved[0])
    return _steps(context, live, 24)


def coming_and_going(context: pyllamakv.Context, saved: sparse.States) -> float:
    """Serve three conversations; the oldest is removed when the next one starts."""
    del saved
    context.clear()
    open_: list[pyllamakv.Sequence] = []
    seconds = 0.0
    for number in range(5):
        if len(open_) == 3:
            open_.pop(0).close()
        newcomer = context.sequence()
        begin = time.perf_counter()
        context.prefill(newcomer, [(number + i) % 32 for i in range(sparse.LIVE)])
        open_.append(newcomer)
        for _ in range(3):
            context.step_all(open_, [7] * len(open_))
        seconds += time.perf_counter() - begin
    for each in open_:
        each.close()
    return seconds


WORKLOADS: dict[str, Workload] = {
    "24 tokens at the end of a sparse cache": long_chat,
    "3 tokens there": short_answer,
    "24 tokens in a compact cache": compact,
    "conversations that come and go": coming_and_going,
}


def figures(
    tick: Tick,
    spec: str | Path = f"{sparse.RELEASE}+patched",
    pairs: int = MINIMUM_PAIRS,
    cells: int = CELLS,
    shape: architectures.Shape = sparse.WIDE,
) -> list[Figure]:
    """Measure each workload with and without flash attention, one thread."""
    model = synthetic_models.generate(shape, home() / "models")
    found = []
    with pyllamakv.open(spec) as library, library.load_model(model) as loaded:
        for name, setting in sparse.SETTINGS.items():
            for what, workload in WORKLOADS.items():
                options = sparse.options(cells, setting)
                with (
                    loaded.context(**options, defrag_policy="threshold") as threshold,
                    loaded.context(**options) as never,
                ):
                    found.append(_figure(what, name, workload, threshold, never, pairs, tick))
    return found


def _figure(
    what: str,
    setting: str,
    workload: Workload,
    threshold: pyllamakv.Context,
    never: pyllamakv.Context,
    pairs: int,
    tick: Tick,
) -> Figure:
    saved = sparse.states(never)
    before = threshold.counters.defrags
    times = interleave(
        lambda: workload(threshold, saved),
        lambda: workload(never, saved),
        pairs=pairs,
        progress=tick,
    )
    moved = (threshold.counters.defrags - before) / (pairs + 1)
    ratio: Interval = times.ratio
    data: dict[str, Any] = {"threshold": times.first, "never": times.second}
    return Figure(
        GROUP,
        f"{what}, {setting}: `threshold` over `never`",
        f"{ratio.format(3)} x, {moved:.1f} defragmentations each time",
        "the interval includes 1.0, or is below",
        ratio.low <= 1.0,
        "",
        f"{pairs} interleaved pairs, {CELLS} cells, 1 thread",
        data,
    )


def _steps(context: pyllamakv.Context, live: pyllamakv.Sequence, n: int) -> float:
    begin = time.perf_counter()
    for _ in range(n):
        context.step(live, 7)
    seconds = time.perf_counter() - begin
    live.close()
    return seconds
