"""Measure how long a signal waits for a decode, and what the check for signals costs.

Each operation gets a signal at a random time, with and without the check, interleaved. The check is
that of `pyllamakv.binding.signal_check`; without it, Python runs handlers when the call of C
returns. Latencies are times of the CPU in the thread that decodes, which do not depend on other
work of the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

import pyllamakv
from pyllamakv import models
from pyllamakv.binding import signal_check
from pyllamakv.errors import HarnessError
from pyllamakv.native._plk import ffi
from pyllamakv.scenarios import synthetic_models
from qa.bench.figure import Figure
from qa.bench.measure import interleave, interval
from qa.interrupts import Interrupted, signalled

GROUP = "Signals during a decode"
Tick = Callable[[], None]

#: Releases, sizes of batches, and interrupts of an operation with and without the check.
RELEASES, BATCHES, INTERRUPTS, WITHOUT = ("0.3.9", "b11549"), (512, 1024), 20, 1
#: Maximum calls for a sample, and the factor of the delay after each that ends before its signal.
TRIES, SOONER = 20, 0.7
#: Maximum seconds, microseconds per decode call, and share of a prefill.
LATENCY, CALL_COST, PREFILL_COST = 0.1, 1.0, 0.005
PROMPT, STEPS = 1024, 60
#: Rounds of 20 decode calls, and the percentile of their times that is compared: others include
#: those of other processes.
ROUNDS, FAST = 400, 5


def figures(tick: Tick, specs: tuple[str, ...] = RELEASES) -> list[Figure]:
    """Measure latencies with SmolLM2, and the cost of the check."""
    found = []
    for spec in specs:
        with (
            pyllamakv.open(spec) as library,
            library.load_model(models.get("smollm2-135m")) as model,
        ):
            for n_batch in BATCHES:
                with ExitStack() as stack:
                    for name, call in operations(model, n_batch, stack).items():
                        after, before = latencies(library, call, tick)
                        found.append(latency_figure(spec, n_batch, name, after, before))
            found.append(prefill_cost(spec, library, model, tick))
        found.append(call_cost(spec, tick))
    return found


def operations(
    model: pyllamakv.Model, n_batch: int, stack: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return long operations by name. Each begins with empty sequences."""
    prompt = model.tokenize("The history of the sea is long. " * 200)[:PROMPT]
    text = model.detokenize(prompt[: n_batch - 64])
    new = partial(model.context, n_ctx=2 * PROMPT, n_batch=n_batch, n_ubatch=n_batch, n_threads=1)
    context, batches, pooled = new(), new(), new(embeddings=True, pooling="mean")
    for each in (context, batches, pooled):
        stack.enter_context(each)
    one = context.sequence()
    greedy = stack.enter_context(model.sampler(temperature=0.0))

    def begin(n: int) -> None:
        one.remove()
        one.prefill(prompt[:n])

    def decode() -> None:
        one.remove()
        context.decode([one.feed(prompt[:n_batch])])

    def advance() -> None:
        begin(1)
        context.advance([one], [prompt[1]], STEPS, greedy)

    def generate() -> None:
        begin(1)
        for _ in one.generate(STEPS, stop_at_end=False):
            pass

    def chat() -> None:
        one.remove()
        for _ in context.chat([{"role": "user", "content": text}], 8, sequence=one):
            pass

    def batcher() -> None:
        # In a context of its own: another one's only sequence is taken.
        with pyllamakv.PrefixCache(batches) as cache, pyllamakv.Batcher(cache) as requests:
            requests.submit(prompt[:n_batch], max_tokens=8).result()

    return {
        "decode": decode,
        "prefill": lambda: begin(PROMPT),
        "advance": advance,
        "generate": generate,
        "chat": chat,
        "embed": lambda: pooled.embed([prompt[: n_batch - 1]]),
        "batcher": batcher,
    }


@contextmanager
def unchecked(library: Any) -> Iterator[None]:
    """Remove the check for signals from a library until the end of the block."""
    lib = library.native._lib
    lib.plk_interrupts(ffi.NULL, 0)
    try:
        yield
    finally:
        signal_check.install(lib)


def latencies(
    library: Any, call: Callable[[], object], tick: Tick
) -> tuple[list[float], list[float]]:
    """Return the CPU seconds between a signal and its exception, with the check and without."""
    began = time.thread_time()
    call()
    usual = time.thread_time() - began
    draw = random.Random(1)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(INTERRUPTS):
        for number, times in enumerate(found):
            if number and turn >= WITHOUT:
                continue
            with ExitStack() as stack:
                if number:
                    stack.enter_context(unchecked(library))
                times.append(sample(call, draw.uniform(0.05, 0.5) * usual))
            tick()
    return found


def sample(call: Callable[[], object], delay: float) -> float:
    """Return a latency, after a shorter delay if the call ends before its signal.

    The usual time is that of the first call, which may be longer than later ones. Raises
    HarnessError if no signal arrives during a call.
    """
    for _ in range(TRIES):
        seconds = latency(call, delay)
        if seconds is not None:
            return seconds
        delay *= SOONER
    raise HarnessError(f"{TRIES} calls ended before their signals, the last after {delay:.2g} s")


def latency(call: Callable[[], object], delay: float) -> float | None:
    """Return the CPU seconds between a signal after ``delay`` of them and its exception.

    None if the call ended before the signal.
    """
    ended = None
    with suppress(Interrupted), signalled(delay) as sent:
        try:
            call()
        except Interrupted:
            ended = time.thread_time()
            raise
    return None if ended is None else ended - sent[0]


def latency_figure(
    spec: str, n_batch: int, name: str, after: list[float], before: list[float]
) -> Figure:
    """Return the latency of an operation with the check, and what it was without."""
    first, second = interval(after), interval(before)
    return Figure(
        GROUP,
        f"{spec}, n_batch = n_ubatch = {n_batch}: {name}",
        f"{first.median:.3f} s, at most {max(after):.3f}; without the check {second.median:.2f} s, "
        f"at most {max(before):.2f}",
        f"<= {LATENCY} s or one operation of ggml",
        max(after) <= LATENCY or None,
        "one operation of ggml",
        f"SmolLM2 135M, one thread, CPU time; {len(after)} signals at random times in the first "
        f"half, {len(before)} without the check",
        {"with": after, "without": before},
    )


def prefill_cost(spec: str, library: Any, model: pyllamakv.Model, tick: Tick) -> Figure:
    """Compare a prefill with the check with one without."""
    prompt = model.tokenize("The history of the sea is long. " * 200)[:256]
    with model.context(n_ctx=512, n_batch=256, n_threads=1) as context:
        one = context.sequence()

        def prefill() -> float:
            one.remove()
            begin = time.process_time()
            one.prefill(prompt)
            return time.process_time() - begin

        def without() -> float:
            with unchecked(library):
                return prefill()

        prefill()
        pairs = interleave(prefill, without, pairs=30, progress=tick)
    ratio = pairs.ratio
    return Figure(
        GROUP,
        f"{spec}: a prefill of 256 tokens with the check, over one without",
        ratio.format(4, "x"),
        f"interval not entirely above {1 + PREFILL_COST} x",
        ratio.low <= 1 + PREFILL_COST,
        "1 x",
        "SmolLM2 135M, one thread, CPU time, 30 interleaved pairs",
        {"with": pairs.first, "without": pairs.second},
    )


def call_cost(spec: str, tick: Tick) -> Figure:
    """Compare decode calls with the check with those without."""
    with (
        pyllamakv.open(spec) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1) as context,
    ):
        one = context.sequence()

        def steps() -> list[float]:
            one.remove()
            seconds = []
            for i in range(40):
                begin = time.perf_counter()
                one.step(i % 32)
                seconds.append(time.perf_counter() - begin)
            return seconds[20:]

        checked: list[float] = []
        unchecked_calls: list[float] = []
        for _ in range(ROUNDS):
            checked += steps()
            with unchecked(library):
                unchecked_calls += steps()
            tick()
    fast, base = (np.percentile(each, FAST) * 1e6 for each in (checked, unchecked_calls))
    return Figure(
        GROUP,
        f"{spec}: a decode call with the check, over one without",
        f"{fast - base:.2f} us",
        f"<= {CALL_COST:.0f} us",
        bool(fast - base <= CALL_COST),
        f"the call: {base:.0f} us",
        f"percentile {FAST} of {len(checked):,} calls each, in alternation; model of one layer",
        {"with": float(fast), "without": float(base)},
    )
