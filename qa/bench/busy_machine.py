"""Measure the default number of threads, and each number, alone and beside busy processes.

Threads of ggml spin while they wait for each other. On busy CPUs, too many of them take tens of
seconds for some tokens. A generation that takes longer than `PATIENCE` is cancelled. Each is in a
worker, so that the default is that of a program: `python -m qa` fixes the number for everything
else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyllamakv
from pyllamakv import models
from pyllamakv.cpus import usable_cpus
from pyllamakv.errors import Cancelled, WorkerDied
from qa.bench.figure import Figure

GROUP = "Threads on a busy machine"
Tick = Callable[[], None]

#: Releases, numbers of busy processes, tokens, and seconds after which a generation is cancelled.
RELEASES, BUSY, TOKENS, PATIENCE = ("0.3.9", "b11549"), (0, 1, 2), 20, 60.0
#: Maximum ratio of the default's time to the best one.
LIMIT = 2.0
#: Rounds of each number; the median counts.
ROUNDS = 3


def figures(tick: Tick, specs: tuple[str, ...] = RELEASES) -> list[Figure]:
    """Compare the default with 1 thread and with all usable CPUs."""
    found = []
    with _no_fixed_number():
        for spec in specs:
            try:
                found += compare(spec, tick)
            except WorkerDied as error:  # such as on CPUs for which the release is compiled wrongly
                found.append(Figure(GROUP, f"{spec}: SmolLM2 135M", f"not measured: {error}"))
    return found


def compare(spec: str, tick: Tick) -> list[Figure]:
    """Measure one release, alone and beside each number of processes."""
    found = []
    with (
        pyllamakv.open(spec, isolated=True) as library,
        library.load_model(models.get("smollm2-135m")) as model,
    ):
        for busy in BUSY:
            with processes(busy):
                seconds = measure(model, tick)
            found.append(figure(spec, busy, seconds))
    return found


def measure(model: pyllamakv.Model, tick: Tick) -> dict[int | None, list[float]]:
    """Return the seconds of each number of threads, interleaved; None is the default."""
    numbers = (None, *sorted({1, usable_cpus()}))
    seconds: dict[int | None, list[float]] = {number: [] for number in numbers}
    for _ in range(ROUNDS):
        for number in numbers:
            if max(seconds[number], default=0) < PATIENCE:  # the median is known to be no less
                seconds[number].append(generate(model, number))
            tick()
    return seconds


def generate(model: pyllamakv.Model, n_threads: int | None) -> float:
    """Return the seconds of `TOKENS` tokens after a prompt; `PATIENCE` if they take longer."""
    prompt = model.tokenize("The history of the sea is long. " * 16)[:128]
    with model.context(n_ctx=256, n_threads=n_threads) as context:
        sequence = context.sequence()
        timer = threading.Timer(PATIENCE, context.cancel)
        timer.start()
        begin = time.perf_counter()
        try:
            sequence.prefill(prompt)
            for _ in sequence.generate(TOKENS, stop_at_end=False):
                pass
        except Cancelled:
            return PATIENCE
        finally:
            timer.cancel()
        return time.perf_counter() - begin


@contextmanager
def processes(busy: int) -> Iterator[None]:
    """Run busy processes until the end of the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


@contextmanager
def _no_fixed_number() -> Iterator[None]:
    """Remove the number of threads that `qa` sets, until the end of the block."""
    fixed = os.environ.pop("PYLLAMAKV_THREADS", None)
    try:
        yield
    finally:
        if fixed is not None:
            os.environ["PYLLAMAKV_THREADS"] = fixed


def figure(spec: str, busy: int, seconds: dict[int | None, list[float]]) -> Figure:
    """Return the default's time over the best one's."""
    median = {
        number: PATIENCE if max(each) >= PATIENCE else sorted(each)[len(each) // 2]
        for number, each in seconds.items()
    }
    best = min(median.values())
    names = {number: "default" if number is None else f"n_threads={number}" for number in seconds}
    listed = ", ".join(
        f"{names[number]} {'over ' if each >= PATIENCE else ''}{each:.2f} s"
        for number, each in median.items()
    )
    ratio = median[None] / best
    beside = "alone" if not busy else f"beside {busy} busy process{'es' if busy > 1 else ''}"
    return Figure(
        GROUP,
        f"{spec}, {beside}: the default over the best number of threads",
        f"{ratio:.2f} x: {listed}",
        f"<= {LIMIT:.0f} x",
        ratio <= LIMIT,
        "1 x",
        f"a prompt of 128 and {TOKENS} tokens of SmolLM2 135M, {ROUNDS} rounds, interleaved",
        {names[number]: each for number, each in seconds.items()},
    )
