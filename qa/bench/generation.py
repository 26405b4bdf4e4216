"""Compare generation for several clients with llama-cpp-python, on one library and one model.

`Batcher` generates for all clients at once. The high-level `Llama` of llama-cpp-python has one
sequence, so its clients are served one after the other. Both sides use one thread and greedy
sampling, and must generate the same tokens. Every prompt has another first token, so that neither
side reuses cells. `Llama.generate` returns tokens; `Batcher` also returns their text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyllamakv
from pyllamakv import models
from pyllamakv.building.variant import Variant
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Untestable
from pyllamakv.runtime.context import Context
from qa.bench import loop
from qa.bench.figure import Figure
from qa.bench.measure import Pairs, interleave
from qa.bench.peer_loops import peer
from qa.bench.workload import Round, Runner, require_same_result

GROUP = "Generation"
#: Numbers of clients.
CLIENTS = (1, 4, 8, 16)
#: Interleaved pairs of rounds per figure.
PAIRS = 8
#: The text of every prompt: about 30 tokens. Its repetition makes the next token certain, so that
#: the noise of batch sizes cannot change a token.
TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@dataclass(frozen=True)
class ClientWorkload:
    """A prompt of each client in every round, and ``steps`` tokens to generate for each.

    ``n_ctx`` is the number of cells of a client.
    """

    prompts: list[list[list[int]]]
    steps: int = 32
    n_ctx: int = 128
    n_batch: int = 512

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.prompts[0])

    def to_json(self) -> dict[str, Any]:
        """Return what the child process needs."""
        return asdict(self)


def figures(tick: loop.Tick, spec: str = "0.3.36+patched", pairs: int = PAIRS) -> list[Figure]:
    """Measure each number of clients."""
    variant, model = loop.built(spec), models.get("smollm2-135m")
    return [measure(variant, model, clients, pairs, tick) for clients in CLIENTS]


def measure(variant: Variant, model: Path, clients: int, pairs: int, tick: loop.Tick) -> Figure:
    """Compare one number of clients. Raises HarnessError if the tokens differ."""
    # interleave() runs a pair that is not measured.
    work = workload(variant, model, clients, pairs + 1)
    rounds: dict[str, list[Round]] = {"ours": [], "theirs": []}

    def timed(side: str, run: Runner) -> Callable[[], float]:
        def once() -> float:
            rounds[side].append(run())
            return rounds[side][-1].seconds

        return once

    try:
        with ours(variant, model, work) as mine, peer(variant, model, work, "clients") as theirs:
            cpu = interleave(
                timed("theirs", theirs), timed("ours", mine), pairs=pairs, progress=tick
            )
    except Untestable as error:
        return Figure(GROUP, _name(clients), "not measured", how=str(error))
    for a, b in zip(rounds["ours"], rounds["theirs"], strict=True):
        require_same_result(_name(clients), a, b)
    walls = {side: [one.wall for one in those[1:]] for side, those in rounds.items()}
    cost = batch_cost(variant, model, work)
    return figure(work, model, Pairs(walls["theirs"], walls["ours"]), cpu, cost)


def workload(variant: Variant, model: Path, clients: int, rounds: int) -> ClientWorkload:
    """Return prompts whose first tokens are all different."""
    with pyllamakv.open(variant.folder) as library, library.load_model(model) as loaded:
        text, first = loaded.tokenize(TEXT), loaded.info.n_vocab // 2
    numbers = (range(clients * n, clients * (n + 1)) for n in range(rounds))
    return ClientWorkload([[[first + n, *text] for n in those] for those in numbers])


@contextmanager
def ours(variant: Variant, model: Path, work: ClientWorkload) -> Iterator[Runner]:
    """Run the rounds, interleaved, with a batcher."""
    prompts = iter(work.prompts)
    with (
        opened(variant, model, work) as context,
        SlotCache(context) as cache,
        Batcher(cache) as batcher,
    ):

        def run() -> Round:
            asked, wall, cpu = next(prompts), time.perf_counter(), time.thread_time()
            going = [batcher.submit(each, work.steps, stop_at_end=False) for each in asked]
            batcher.run()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            return Round(cpu, [float(token) for one in going for token in one.tokens], wall)

        yield run


@contextmanager
def opened(variant: Variant, model: Path, work: ClientWorkload) -> Iterator[Context]:
    """Open a context with the cells of all clients."""
    with (
        pyllamakv.open(variant.folder) as library,
        library.load_model(model) as loaded,
        loaded.context(
            n_ctx=work.clients * work.n_ctx,
            n_batch=work.n_batch,
            n_ubatch=work.n_batch,
            n_seq_max=work.clients,
            n_threads=1,
            # Sums over the cells of one client have the order of a context with one client.
            kv_unified=pyllamakv.Capability.KV_UNIFIED not in library.about.capabilities,
        ) as context,
    ):
        yield context


def batch_cost(variant: Variant, model: Path, work: ClientWorkload) -> Pairs:
    """Return CPU seconds per token of decodes: of all clients, and of one in a context of its own.

    The difference is llama.cpp's, not the batcher's.
    """
    single = replace(work, prompts=[each[:1] for each in work.prompts])
    with (
        opened(variant, model, work) as context,
        opened(variant, model, single) as other,
    ):
        tokens = [prompt[-1] for prompt in work.prompts[0]]
        sequences = [context.sequence() for _ in tokens]
        alone = other.sequence()
        other.decode(alone.feed(work.prompts[0][0]))
        for sequence, prompt in zip(sequences, work.prompts[0], strict=True):
            context.decode(sequence.feed(prompt))

        def all_clients() -> float:
            begin = time.thread_time()
            context.step_all(sequences, tokens)
            return (time.thread_time() - begin) / len(tokens)

        def one_client() -> float:
            begin = time.thread_time()
            alone.step(tokens[0])
            return time.thread_time() - begin

        return interleave(all_clients, one_client, pairs=work.steps - 1)


def figure(work: ClientWorkload, model: Path, wall: Pairs, cpu: Pairs, cost: Pairs) -> Figure:
    """Return the ratio of the throughputs; llama-cpp-python is the first of each pair.

    ``cost`` is that of `batch_cost`. CPU time decides, because other programs affect it least.
    """
    tokens = work.clients * work.steps

    def per_second(seconds: list[float]) -> float:
        return tokens / median(seconds)

    def milliseconds(seconds: list[float]) -> float:
        return 1e3 * median(seconds) / tokens

    return Figure(
        GROUP,
        _name(work.clients),
        f"{cpu.ratio.format()} times the tokens per CPU second of llama-cpp-python, "
        f"{wall.ratio.format()} times by the wall clock",
        "interval not entirely below 1.0",
        cpu.ratio.high >= 1,
        f"CPU per token {milliseconds(cpu.second):.2f} and {milliseconds(cpu.first):.2f} ms; "
        f"{per_second(wall.second):.0f} and {per_second(wall.first):.0f} tokens/s"
        + (
            f"; a decode of all clients in one batch costs {cost.ratio.format()} times as much per "
            "token as of one client alone"
            if work.clients > 1
            else ""
        ),
        f"{len(wall.first)} interleaved pairs, prompts of {len(work.prompts[0][0])} and answers of "
        f"{work.steps} tokens, {model.stem}, 1 thread, the same libraries and tokens",
        {
            "wall": {"llama-cpp-python": wall.first, "ours": wall.second},
            "cpu": {"llama-cpp-python": cpu.first, "ours": cpu.second},
        },
    )


def _name(clients: int) -> str:
    return f"{clients} client{'s' if clients > 1 else ''}"
