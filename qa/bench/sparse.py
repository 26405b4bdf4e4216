"""Measure the cost of a sparse cache, and of compacting it: by moving, and by restoring."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyllamakv
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.architectures import Shape
from qa.bench.figure import Figure
from qa.bench.measure import Interval, Pairs, interleave

GROUP = "A sparse cache"
Tick = Callable[[], None]
States = tuple[bytes, bytes]

#: The last pinned release: stock moves no cells and accepts scattered slots.
RELEASE = "0.3.36"

#: The K and V rows of a model of a billion parameters; everything else is small.
WIDE = Shape("wide", n_layer=16, n_embd=512, n_head=8, n_head_kv=8, n_ff=32, n_vocab=64)

SIZES = (8192, 32768)
SETTINGS: dict[str, dict[str, Any]] = {
    "flash attention": {"flash_attn": True},
    "no flash attention": {"flash_attn": False},
}

LIVE = 200
FILLER = 1024
STEPS = 4


def figures(
    tick: Tick,
    stock: str | Path = f"{RELEASE}+stock",
    patched: str | Path = f"{RELEASE}+patched",
    pairs: int = 30,
    sizes: tuple[int, ...] = SIZES,
    shape: Shape = WIDE,
) -> list[Figure]:
    """Measure each size with and without flash attention, one thread."""
    model = synthetic_models.generate(shape, home() / "models")
    return [
        _figure(cells, name, setting, stock, patched, model, pairs, tick)
        for cells in sizes
        for name, setting in SETTINGS.items()
    ]


def _figure(
    cells: int,
    name: str,
    setting: dict[str, Any],
    stock: str | Path,
    patched: str | Path,
    model: Path,
    pairs: int,
    tick: Tick,
) -> Figure:
    how = options(cells, setting)
    with (
        pyllamakv.open(stock) as library,
        library.load_model(model) as loaded,
        loaded.context(**how) as context,
    ):
        restored = _repeat(context, tick)
    with (
        pyllamakv.open(patched) as library,
        library.load_model(model) as loaded,
        loaded.context(**how) as context,
        loaded.context(**how) as fresh,
    ):
        moved = _repeat(context, tick)
        scatter(fresh)
        other = alone(fresh)
        live = scatter(context)
        sparse = compare(live, other, pairs, tick)
        context.kv.defrag(fallback=False)
        compact = compare(live, other, pairs, tick)
    lost, left = sparse.ratio, compact.ratio
    peer = statistics.median(a / b for a, b in zip(restored, moved, strict=True))
    return Figure(
        GROUP,
        f"{cells} cells, {LIVE} live at the end, {name}",
        f"decodes {_times(lost)} as long as in a fresh cache; compacted {_times(left)}",
        "compacted: the interval includes 1.0",
        left.low <= 1.0,
        f"saving and restoring takes {peer:.1f} times as long as the {_ms(moved)} of moving",
        f"{pairs} interleaved pairs of {STEPS} tokens, 1 thread, 16 layers of 8 heads of 64, f16",
        {
            "sparse": sparse.first,
            "fresh beside sparse": sparse.second,
            "compacted": compact.first,
            "fresh beside compacted": compact.second,
            "moved": moved,
            "restored": restored,
        },
    )


def options(cells: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Return the context options for a number of cells."""
    sizes = {"n_ctx": cells, "n_batch": 512, "n_ubatch": 512, "n_threads": 1}
    return {**sizes, "n_seq_max": cells // FILLER + 1, **setting}


def states(context: pyllamakv.Context) -> States:
    """Return the states that `scatter` restores: one to keep, and one to remove."""
    context.clear()
    found = []
    for length in (LIVE, FILLER):
        with context.sequence() as sequence:
            sequence.prefill([i % 32 for i in range(length)])
            found.append(sequence.save())
    return found[0], found[1]


def scatter(context: pyllamakv.Context, saved: States | None = None) -> pyllamakv.Sequence:
    """Fill the cache by restoring one state repeatedly, and keep the last cells."""
    kept, filler = saved or states(context)
    context.clear()
    fillers = [context.sequence() for _ in range((context.info.n_ctx - 512) // FILLER)]
    for each in fillers:
        each.restore(filler)
    live = context.sequence()
    live.restore(kept)
    for each in fillers:
        each.close()
    return live


def alone(context: pyllamakv.Context) -> pyllamakv.Sequence:
    """Return the only sequence of a cache without other tokens."""
    context.clear()
    live = context.sequence()
    live.prefill([i % 32 for i in range(LIVE)])
    return live


def _repeat(context: pyllamakv.Context, tick: Tick, rounds: int = 5) -> list[float]:
    """Return the seconds of compacting the scattered cache, set up anew each time."""
    found = []
    for _ in range(rounds + 1):
        live = scatter(context)
        found.append(context.kv.defrag().seconds)
        live.close()
        tick()
    # The first run touches memory for the first time.
    return found[1:]


def compare(
    live: pyllamakv.Sequence,
    other: pyllamakv.Sequence,
    pairs: int,
    tick: Tick,
    warm: int = 0,
) -> Pairs:
    """Return the seconds of steps of ``live``, and of ``other`` in a fresh cache, interleaved.

    ``warm`` steps precede each measured group, for devices that are slower after a step in another
    context.
    """
    return interleave(
        lambda: _seconds(live, warm),
        lambda: _seconds(other, warm),
        pairs=pairs,
        progress=tick,
    )


def _seconds(sequence: pyllamakv.Sequence, warm: int = 0) -> float:
    for _ in range(warm):
        sequence.step(7)
    begin = time.perf_counter()
    for _ in range(STEPS):
        sequence.step(7)
    seconds = time.perf_counter() - begin
    sequence.trim(LIVE)
    return seconds


def _times(ratio: Interval) -> str:
    return f"{ratio.format()} times"


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms"
