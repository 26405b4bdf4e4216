"""Compare the run time with a cache in mapped memory, in a file, and in heap memory."""

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
    shape: architectures.Shape = WIDE,
) -> list[Figure]:
    """Measure each claim of the patch mmap-kv."""
    with (
        pyllamakv.open(patched) as library,
        library.load_model(synthetic_models.generate(shape, home() / "models")) as model,
        tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder,
    ):
        return [
            *(_speed(model, "mmap", flash, pairs, tick) for flash in (True, False)),
            _speed(model, Path(folder), True, pairs, tick),
            _resumed(model, Path(folder) / "cache", min(pairs, 10), tick),
        ]


def options(cells: int, flash: bool) -> dict[str, Any]:
    """Return the context options for a number of cells."""
    sizes = {"n_ctx": cells, "n_batch": 512, "n_ubatch": 512, "n_threads": 1}
    return {**sizes, "n_seq_max": 4, "flash_attn": flash}


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


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"
