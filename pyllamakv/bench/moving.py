"""Measure a complete defragmentation: ours, stock's own passes, and memcpy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pyllamakv
from pyllamakv.bench.figure import Figure
from pyllamakv.bench.measure import interval
from pyllamakv.harness import synthetic
from pyllamakv.home import home
from pyllamakv.source.releases import DEFAULT

GROUP = "A complete defragmentation"
Tick = Callable[[], None]

#: The shape of the K and V rows of a model of a billion parameters; everything else is small.
WIDE = synthetic.Shape("wide", n_layer=16, n_embd=512, n_head=8, n_head_kv=8, n_ff=32, n_vocab=64)

SETTINGS: dict[str, dict[str, Any]] = {
    "flash attention, f16": {"flash_attn": True},
    "no flash attention, f16": {"flash_attn": False},
    "flash attention, q8_0": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
}


def figures(tick: Tick, release: str = DEFAULT, cells: int = 4096, rounds: int = 5) -> list[Figure]:
    """Measure each setting on stock and patched, interleaved in one process."""
    model = synthetic.generate(WIDE, home() / "models")
    return [
        _figure(name, setting, release, model, cells, rounds, tick)
        for name, setting in SETTINGS.items()
    ]


def _figure(
    name: str,
    setting: dict[str, Any],
    release: str,
    model: Path,
    cells: int,
    rounds: int,
    tick: Tick,
) -> Figure:
    sides: dict[str, list[float]] = {"stock": [], "patched": [], "memcpy": []}
    moved = 0
    with (
        pyllamakv.open(f"{release}+stock") as stock,
        pyllamakv.open(f"{release}+patched") as patched,
        stock.load_model(model) as stock_model,
        patched.load_model(model) as patched_model,
    ):
        contexts = {
            side: loaded.context(
                n_ctx=cells, n_batch=256, n_ubatch=256, n_seq_max=2, n_threads=2, **setting
            )
            for side, loaded in (("stock", stock_model), ("patched", patched_model))
        }
        for _ in range(rounds):
            for side, context in contexts.items():
                _scatter(context, cells - 512)
                seconds, bytes_moved = _complete(context)
                sides[side].append(seconds)
                moved = max(moved, bytes_moved)
                tick()
            sides["memcpy"].append(_memcpy(moved))
        for context in contexts.values():
            context.close()
    stock_over = interval([a / b for a, b in zip(sides["stock"], sides["patched"], strict=True)])
    over_limit = interval([a / b for a, b in zip(sides["patched"], sides["memcpy"], strict=True)])
    return Figure(
        GROUP,
        f"{cells} cells, every other one live, {name}",
        f"{interval(sides['patched']).median * 1e3:.1f} ms; "
        f"stock's passes take {stock_over.format(1)} times as long",
        "",
        None,
        f"{over_limit.format(1)} times memcpy of the {moved / 1e6:.0f} MB",
        f"{rounds} rounds, stock and patched in turn in one process",
        dict(sides),
    )


def _scatter(context: pyllamakv.Context, used: int) -> None:
    """Lay two sequences cell by cell in turn, and take one away."""
    context.clear()
    keep, drop = 0, 1
    for start in range(0, used // 2, 128):
        batch = pyllamakv.Batch()
        for pos in range(start, min(start + 128, used // 2)):
            batch.add(pos % 32, pos, keep).add(pos % 32, pos, drop)
        context.decode(batch)
    leaving = context.sequence(drop)
    leaving.remove()
    leaving.close()


def _complete(context: pyllamakv.Context) -> tuple[float, int]:
    seconds, total = 0.0, 0
    info = context.kv.snapshot().streams[0].info
    row = (info.bytes_k + info.bytes_v) // info.n_cells
    while True:
        report = context.kv.defrag()
        seconds += report.seconds
        total += (report.cells or 0) * row
        if not report.cells:
            return seconds, total


def _memcpy(size: int) -> float:
    source = np.ones(max(size, 1), dtype=np.uint8)
    target = np.empty_like(source)
    target[:] = source
    begin = time.perf_counter()
    target[:] = source
    return time.perf_counter() - begin
