"""Measure the cost that the patch adds to decodes without a defragmentation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import pyllamakv
from pyllamakv.scenarios import synthetic_models
from qa.bench.figure import Figure
from qa.bench.measure import interleave

Tick = Callable[[], None]


def figure(
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
            sequence.step(number % 32)
        return time.perf_counter() - begin
