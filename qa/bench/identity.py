"""Measure the digest that identifies a model, and what it adds to saves within one process."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyllamakv
from pyllamakv import content_digest
from pyllamakv.cpus import usable_cpus
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench.figure import Figure
from qa.bench.measure import clock, interleave, interval

GROUP = "The identity of a model"
Tick = Callable[[], None]

#: Bytes of the file.
SIZE = 10**9
TOKENS = [1 + i % 50 for i in range(1000)]


def figures(tick: Tick, size: int = SIZE, pairs: int = 30) -> list[Figure]:
    """Return all figures of this module."""
    with tempfile.TemporaryDirectory() as folder:
        return [*_digest(Path(folder), tick, size, pairs), _saves(tick, pairs)]


def _digest(folder: Path, tick: Tick, size: int, pairs: int) -> list[Figure]:
    path = folder / "model.gguf"
    block = os.urandom(1 << 20)
    with path.open("wb") as out:
        for at in range(0, size, len(block)):
            out.write(block[: size - at])

    def once(age: int) -> float:
        # A file with a new time has no known digest.
        os.utime(path, ns=(age, age))
        return clock(lambda: content_digest.compute([content_digest.record(path)]))

    seconds, cpu = [], []
    for number in range(5):
        begin = time.process_time()
        seconds.append(once(number) * 10**9 / size)
        cpu.append((time.process_time() - begin) * 10**9 / size)
        tick()
    # A digest is kept once the last change of the file is old enough.
    time.sleep(content_digest.SETTLED_NS / 1e9 + 0.1)
    known = [content_digest.record(path)]
    content_digest.compute(known)
    again = [clock(lambda: content_digest.compute(known)) for _ in range(pairs * 10)]
    slow, work, fast = interval(seconds), interval(cpu), interval(again)
    return [
        Figure(
            GROUP,
            "the digest of a file in the page cache",
            f"{slow.format(unit='s per GB')}, CPU time {work.format(unit='s per GB')}",
            "once per content",
            None,
            "",
            f"{size / 1e9:.1f} GB, {usable_cpus()} threads, {len(seconds)} times",
            {"seconds per GB": seconds, "CPU seconds per GB": cpu},
        ),
        Figure(
            GROUP,
            "a digest that the data directory has",
            f"{fast.median * 1e6:.0f} us",
            "<= 1 ms",
            fast.median <= 1e-3,
            "once per `Model` object",
            f"median of {len(again)}",
            {"seconds": again},
        ),
    ]


def _saves(tick: Tick, pairs: int) -> Figure:
    with (
        pyllamakv.open(f"{TEST_RELEASE}+patched") as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=1024) as context,
    ):
        sequence = context.sequence()
        sequence.prefill(TOKENS)

        def both(portable: bool) -> float:
            begin = time.thread_time()
            for _ in range(10):
                sequence.restore(sequence.save(portable=portable))
            return (time.thread_time() - begin) / 10

        times = interleave(lambda: both(True), lambda: both(False), pairs=pairs, progress=tick)
    return Figure(
        GROUP,
        f"save and restore of {len(TOKENS)} tokens in one process, over the same without a digest",
        f"{times.ratio.format()} x, {interval(times.first).median * 1e3:.2f} ms",
        "the interval includes 1.0, or is below",
        times.ratio.low <= 1,
        "",
        f"CPU time of the thread, {pairs} interleaved pairs of 10, model of one layer",
        {"with": times.first, "without": times.second},
    )
