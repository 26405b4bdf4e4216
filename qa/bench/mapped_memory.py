"""Compare a cache in mapped memory with one in heap memory: memory use and run time."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pyllamakv
from pyllamakv.home import home
from pyllamakv.scenarios import architectures, synthetic_models
from qa.bench.figure import Figure
from qa.bench.measure import Pairs, clock, interleave
from qa.bench.sparse import WIDE

GROUP = "Mapped memory"
Tick = Callable[[], None]

#: A full context of current models.
LARGE = 131072
#: The size of the cache for decodes, and the number of used cells.
CELLS, USED = 8192, 4096
PROMPT = 2048
STEPS = 4
EACH = 3
HOW = "16 layers of 8 heads of 64, f16, 1 thread"


def figures(
    tick: Tick,
    patched: str | Path = "0.3.9+patched",
    pairs: int = 30,
    large: int = LARGE,
    shape: architectures.Shape = WIDE,
) -> list[Figure]:
    """Measure each claim of the patch mmap-kv."""
    with (
        pyllamakv.open(patched) as library,
        library.load_model(synthetic_models.generate(shape, home() / "models")) as model,
        tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder,
    ):
        return [
            *(_resident(model, large, flash) for flash in (True, False)),
            _creation(model, large, tick),
            *(_speed(model, "mmap", flash, pairs, tick) for flash in (True, False)),
            _speed(model, Path(folder), True, pairs, tick),
            *(_equal(model, flash, tick) for flash in (True, False)),
            *(_given_back(model, flash) for flash in (True, False)),
            _resumed(model, Path(folder) / "cache", min(pairs, 10), tick),
        ]


def options(cells: int, flash: bool) -> dict[str, Any]:
    """Return the context options for a number of cells."""
    sizes = {"n_ctx": cells, "n_batch": 512, "n_ubatch": 512, "n_threads": 1}
    return {**sizes, "n_seq_max": 4, "flash_attn": flash}


def _resident(model: pyllamakv.Model, cells: int, flash: bool) -> Figure:
    with model.context(kv_backing="mmap", **options(cells, flash)) as ctx:
        empty = ctx.kv.memory.committed or 0
        ctx.sequence().prefill([1] * 64)
        memory = ctx.kv.memory
    taken = memory.committed or 0
    share = taken / memory.reserved
    return Figure(
        GROUP,
        f"resident after 64 tokens of {cells}, {_name(flash)}",
        f"{_mb(taken)} of {_mb(memory.reserved)}, {share:.2%}; {_mb(empty)} before the first token",
        "<= 5 % with flash attention" if flash else "",
        share <= 0.05 if flash else None,
        f"{_mb(memory.reserved * 64 // cells)} are written",
        HOW,
        {"committed": taken, "reserved": memory.reserved, "empty": empty},
    )


def _creation(model: pyllamakv.Model, cells: int, tick: Tick) -> Figure:
    def make(backing: str) -> Callable[[], float]:
        return lambda: clock(
            lambda: model.context(kv_backing=backing, **options(cells, True)).close()
        )

    found = interleave(make("mmap"), make("heap"), pairs=8, progress=tick)
    return Figure(
        GROUP,
        f"making and closing a context of {cells}: mapped over heap",
        f"{found.ratio.format(3)}; {_ms(found.first)} and {_ms(found.second)}",
        "< 1",
        found.ratio.high < 1,
        "the heap is zeroed completely",
        f"8 interleaved pairs, {HOW}",
        {"mmap": found.first, "heap": found.second},
    )


def _speed(
    model: pyllamakv.Model, backing: str | Path, flash: bool, pairs: int, tick: Tick
) -> Figure:
    how = options(CELLS, flash)
    first: list[float] = []
    second: list[float] = []
    saved = b""
    # The physical placement of pages is random and persistent: a new context every few pairs.
    for number in range(max(1, pairs // EACH)):
        order = (backing, "heap") if number % 2 else ("heap", backing)
        with ExitStack() as stack:
            made = {}
            for each in order:
                context = stack.enter_context(model.context(kv_backing=each, **how))
                sequence = context.sequence()
                if saved:
                    sequence.restore(saved)
                else:
                    sequence.prefill([i % 32 for i in range(USED)])
                    saved = sequence.save()
                made[each] = partial(_seconds, sequence)
            found = interleave(made[backing], made["heap"], pairs=EACH, progress=tick)
        first += found.first
        second += found.second
    found = Pairs(first, second)
    return Figure(
        GROUP,
        f"decoding after {USED} tokens, {_name(flash)}: {_what(backing)} over heap",
        f"{found.ratio.format(3)} times as long; {_ms(found.second)} on the heap",
        "the interval includes 1.0, or is below",
        found.ratio.low <= 1.0,
        "1: the same decode",
        f"{len(first)} interleaved pairs of {STEPS} tokens, caches made anew after each {EACH}, "
        f"{CELLS} cells, {HOW}, CPU time",
        {"mapped": found.first, "heap": found.second},
    )


def _equal(model: pyllamakv.Model, flash: bool, tick: Tick) -> Figure:
    rows: list[list[Any]] = []
    for backing in ("heap", "mmap"):
        with model.context(kv_backing=backing, **options(CELLS, flash)) as ctx:
            first, second = ctx.sequence(), ctx.sequence()
            first.prefill([i % 60 for i in range(1500)])
            second.prefill([i % 50 for i in range(500)])
            first.remove(100, 600)
            first.shift(600, None, -500)
            ctx.kv.defrag()
            found = []
            for i in range(64):
                ctx.step_all((first, second), [i % 60, i % 50])
                found.append(ctx.logits_all().copy())
            rows.append(found)
            tick()
    differ = sum(int((a != b).sum()) for a, b in zip(*rows, strict=True))
    total = sum(row.size for row in rows[0])
    return Figure(
        GROUP,
        f"logits after a shift and a defragmentation, {_name(flash)}: mapped against heap",
        f"{differ} of {total} differ",
        "bit-equal",
        differ == 0,
        "",
        f"2 sequences, 64 tokens each, {HOW}",
        {"differ": differ, "total": int(np.int64(total))},
    )


def _given_back(model: pyllamakv.Model, flash: bool) -> Figure:
    with model.context(kv_backing="mmap", **options(CELLS, flash)) as ctx:
        first, second, third = (ctx.sequence() for _ in range(3))
        for i in range(16):
            for sequence in (first, second, third):
                sequence.prefill([i] * 150)
        full = ctx.kv.memory.committed or 0
        first.remove()
        third.remove()
        at_once = ctx.kv.trim()
        ctx.kv.defrag()
        seconds = clock(ctx.kv.trim)
        memory = ctx.kv.memory
        left, used = memory.committed or 0, len(second)
    needed = memory.reserved * used // CELLS
    return Figure(
        GROUP,
        f"three interleaved sequences, two removed, {_name(flash)}",
        f"{_mb(full)} resident, {_mb(left)} after defragmentation and trim "
        f"({seconds * 1e3:.1f} ms); trim alone gives {_mb(at_once)} back",
        "",
        None,
        f"{_mb(needed)} are used",
        f"3 x 2400 tokens in {CELLS} cells, {HOW}",
        {"full": full, "left": left, "needed": needed, "at_once": at_once, "seconds": seconds},
    )


def _resumed(model: pyllamakv.Model, file: Path, pairs: int, tick: Tick) -> Figure:
    how = options(CELLS, True)
    tokens = [i % 60 for i in range(PROMPT)]
    with model.context(kv_backing=file, kv_keep=True, **how) as ctx:
        ctx.sequence().prefill(tokens)
        flush = clock(ctx.kv.flush)
    rows = []

    def resume() -> float:
        begin = time.perf_counter()
        ctx = model.context(kv_backing=file, kv_keep=True, **how)
        sequence = ctx.sequence(0)
        ctx.decode(sequence.feed([7]))
        rows.append(ctx.logits().copy())
        seconds = time.perf_counter() - begin
        sequence.trim(PROMPT)
        ctx.close()
        return seconds

    def evaluate() -> float:
        begin = time.perf_counter()
        ctx = model.context(**how)
        sequence = ctx.sequence()
        sequence.prefill(tokens)
        ctx.decode(sequence.feed([7]))
        rows.append(ctx.logits().copy())
        seconds = time.perf_counter() - begin
        ctx.close()
        return seconds

    found: Pairs = interleave(resume, evaluate, pairs=pairs, progress=tick)
    same = all(np.array_equal(rows[0], row) for row in rows)
    return Figure(
        GROUP,
        f"the next token after a prompt of {PROMPT}: from a kept file over evaluating again",
        f"{found.ratio.format(4)} of the time; {_ms(found.first)} and {_ms(found.second)}; "
        f"logits {'bit-equal' if same else 'differ'}",
        "< 1, bit-equal",
        found.ratio.high < 1 and same,
        f"flush takes {flush * 1e3:.0f} ms",
        f"{pairs} interleaved pairs with making the context, the file in the page cache, {HOW}",
        {"resume": found.first, "evaluate": found.second, "flush": flush},
    )


def _seconds(sequence: pyllamakv.Sequence) -> float:
    # One thread decodes, this one: other programs on the machine are not counted.
    begin = time.process_time()
    for _ in range(STEPS):
        sequence.step(7)
    seconds = time.process_time() - begin
    sequence.trim(USED)
    return seconds


def _name(flash: bool) -> str:
    return "flash attention" if flash else "no flash attention"


def _what(backing: str | Path) -> str:
    return "mapped" if backing == "mmap" else "an unlinked file"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"
