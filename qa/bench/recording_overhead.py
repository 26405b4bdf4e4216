"""Measure the overhead of recording on decodes, on one context alternately with and without it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyllamakv
from qa.bench.figure import Figure
from qa.bench.loop import model_file
from qa.bench.measure import MINIMUM_PAIRS, Pairs, interleave

GROUP = "Recording"
Tick = Callable[[], None]

#: Maximum overhead of recording, as a factor.
BOUND = 1.03
#: Tokens of a round, for any number of sequences.
TOKENS = 256
#: Name -> number of sequences, and tokens of each in a batch; 0: `advance`, 16 steps.
LOOPS = {
    "`step`, 1 sequence": (1, 1),
    "`step_all`, 8 sequences": (8, 1),
    "`advance`, 8 sequences, 16 steps a call": (8, 0),
    "`prefill` in pieces of 128": (1, 128),
}


def figures(tick: Tick, spec: str = "0.3.9+patched", pairs: int = MINIMUM_PAIRS) -> list[Figure]:
    """Return the time ratio of each loop with and without recording."""
    model = model_file()
    with (
        pyllamakv.open(spec) as library,
        library.load_model(model) as loaded,
        tempfile.TemporaryDirectory(prefix="pyllamakv-recording-") as folder,
    ):
        return [
            _figure(name, model, measure(loaded, Path(folder), n, size, pairs, tick))
            for name, (n, size) in LOOPS.items()
        ]


def measure(
    model: pyllamakv.Model, folder: Path, sequences: int, size: int, pairs: int, tick: Tick
) -> Pairs:
    """Return the seconds of rounds of one context, recorded and not; a round writes its rows."""
    with (
        model.context(n_ctx=2 * TOKENS, n_batch=128, n_ubatch=128, n_seq_max=sequences) as context,
        model.sampler() as sampler,
    ):
        lanes = [context.sequence() for _ in range(sequences)]

        def plain() -> float:
            for lane in lanes:
                lane.remove()
            begin = time.thread_time()
            _round(context, lanes, sampler, size)
            return time.thread_time() - begin

        def recorded() -> float:
            for lane in lanes:
                lane.remove()
            with pyllamakv.record(context, folder / "run.jsonl") as recording:
                begin = time.thread_time()
                _round(context, lanes, sampler, size)
                recording.flush()
                return time.thread_time() - begin

        return interleave(recorded, plain, pairs=pairs, progress=tick)


def _round(
    context: pyllamakv.Context,
    lanes: list[pyllamakv.Sequence],
    sampler: pyllamakv.Sampler,
    size: int,
) -> None:
    tokens = [3 + 7 * n for n in range(len(lanes))]
    if size > 1:
        context.prefill(lanes[0], [3 + n % 250 for n in range(TOKENS)])
    elif len(lanes) == 1:
        for _ in range(TOKENS):
            context.step(lanes[0], tokens[0])
    elif size:
        for _ in range(TOKENS // len(lanes)):
            context.step_all(lanes, tokens)
    else:
        left = TOKENS // len(lanes)
        while left > 0:
            left -= len(context.advance(lanes, tokens, min(16, left), sampler))


def _figure(name: str, model: Path, pairs: Pairs) -> Figure:
    factor = pairs.ratio
    micro = statistics.median(pairs.second) / TOKENS * 1e6
    return Figure(
        GROUP,
        f"{name}, recorded over not recorded",
        f"{factor.format(3)} x",
        f"<= {BOUND}",
        factor.median <= BOUND,
        f"not recorded: {micro:.0f} us a token",
        f"{len(pairs.first)} interleaved pairs of {TOKENS} tokens, {model.stem}, CPU time of 1 "
        "thread; includes writing rows, excludes opening the trace",
        {"recorded": pairs.first, "plain": pairs.second},
    )
