"""Measure the overhead of cache managers and the batching loop over a manual loop.

Both sides decode the same tokens on one model with one thread, and must produce the same last
tokens. The manual loop empties sequences, decodes prompts, and selects and decodes the most likely
token, step by step. Every round has new prompts, so that no prefix is reused and the decodes are
the same. The clock is the CPU time of the thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pyllamakv
from pyllamakv.building import variant as variants
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.interface import CacheManager
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import NotBuilt
from qa.bench.figure import Figure
from qa.bench.loop import model_file
from qa.bench.measure import MINIMUM_PAIRS, Pairs, interleave
from qa.bench.workload import Round, require_same_result

GROUP = "Cache managers"
Tick = Callable[[], None]
Maker = Callable[[pyllamakv.Context], CacheManager]

#: Without host memory: a decode by hand keeps no evicted prompt either.
MANAGERS: dict[str, Maker] = {
    "SlotCache": SlotCache,
    "PrefixCache": partial(PrefixCache, paging=0),
}

#: Maximum ratio of a manager's time to the manual loop's.
LIMIT = 1.05


@dataclass(frozen=True)
class ManagerWorkload:
    """One round: ``sequences`` prompts of ``prompt`` tokens, and ``steps`` tokens each.

    The context has twice the cells of a round, so that the cache is full, which is additional work.
    """

    name: str
    sequences: int
    prompt: int
    steps: int

    @property
    def n_ctx(self) -> int:
        """Return the number of cells."""
        return 2 * self.sequences * (self.prompt + self.steps)

    @property
    def n_batch(self) -> int:
        """Return the number of tokens of all prompts, which are one batch."""
        return self.sequences * self.prompt

    def prompts(self, number: int) -> list[list[int]]:
        """Return the prompts of a round; the first token is unique to the round."""
        firsts = (3 + (number * self.sequences + n) % 500 for n in range(self.sequences))
        return [[first, *(3 + (7 * i + first) % 250 for i in range(1, self.prompt))]
                for first in firsts]  # fmt: skip


ONE = ManagerWorkload("1 sequence", 1, 32, 224)
EIGHT = ManagerWorkload("8 sequences", 8, 32, 64)

#: A side runs one round, given its number.
Side = Callable[[int], Round]


def figures(tick: Tick, spec: str = "0.3.9+patched", pairs: int = MINIMUM_PAIRS) -> list[Figure]:
    """Compare each manager's lease, and the batching loop over it, with the manual loop."""
    variant = variants.find(spec)
    if variant is None:
        msg = f"{spec} is not built here; run: pyllamakv build {spec.partition('+')[0]}"
        raise NotBuilt(msg)
    found = []
    with (
        pyllamakv.open(variant.folder) as library,
        library.load_model(model_file()) as model,
    ):
        for name, make in MANAGERS.items():
            plan = [(f"`{name}`, {ONE.name}", ONE, leased)]
            plan += [(f"`Batcher` over `{name}`, {w.name}", w, batched) for w in (ONE, EIGHT)]
            for title, work, side in plan:
                with by_hand(model, work) as plain, side(model, work, make) as mine:
                    measured = compare(title, plain, mine, pairs, tick)
                found.append(figure(title, work, measured, model.path.stem))
    return found


@contextmanager
def by_hand(model: pyllamakv.Model, work: ManagerWorkload) -> Iterator[Side]:
    """Run the manual loop."""
    with _context(model, work) as context, model.sampler() as sampler:
        lanes = [context.sequence() for _ in range(work.sequences)]

        def run(number: int) -> Round:
            prompts = work.prompts(number)
            begin = time.thread_time()
            for lane in lanes:
                lane.remove()
            if len(lanes) == 1:
                lanes[0].prefill(prompts[0])
            else:
                context.decode([a.feed(b) for a, b in zip(lanes, prompts, strict=True)])
            tokens = sampler.sample_all(context)
            for _ in range(work.steps - 1):
                if len(lanes) == 1:
                    lanes[0].step(tokens[0])
                    tokens = [sampler.sample(context)]
                else:
                    context.step_all(lanes, tokens)
                    tokens = sampler.sample_all(context)
            return Round(time.thread_time() - begin, list(map(float, tokens)))

        yield run


@contextmanager
def leased(model: pyllamakv.Model, work: ManagerWorkload, make: Maker) -> Iterator[Side]:
    """Run the manual loop on a manager's lease of one sequence."""
    with _context(model, work) as context, model.sampler() as sampler, ExitStack() as ending:
        manager = make(context)
        ending.callback(manager.close)

        def run(number: int) -> Round:
            (prompt,) = work.prompts(number)
            begin = time.thread_time()
            with manager.acquire(prompt) as lease:
                lease.make_room(len(lease.rest))
                lease.sequence.prefill(lease.rest)
                token = sampler.sample(context)
                for _ in range(work.steps - 1):
                    lease.make_room(1)
                    lease.sequence.step(token)
                    token = sampler.sample(context)
            return Round(time.thread_time() - begin, [float(token)])

        yield run


@contextmanager
def batched(model: pyllamakv.Model, work: ManagerWorkload, make: Maker) -> Iterator[Side]:
    """Run the prompts through a batcher, which also detokenizes."""
    with _context(model, work) as context, ExitStack() as ending:
        manager = make(context)
        ending.callback(manager.close)
        batcher = ending.enter_context(Batcher(manager))

        def run(number: int) -> Round:
            prompts = work.prompts(number)
            begin = time.thread_time()
            going = [batcher.submit(p, work.steps, stop_at_end=False) for p in prompts]
            batcher.run()
            seconds = time.thread_time() - begin
            return Round(seconds, [float(each.tokens[-1]) for each in going])

        yield run


def compare(name: str, plain: Side, mine: Side, pairs: int, tick: Tick) -> Pairs:
    """Measure both sides alternately: the seconds with a manager, and by hand."""
    numbers = {"mine": 0, "plain": 0}

    def timed(which: str, side: Side) -> float:
        numbers[which] += 1
        last[which] = side(numbers[which])
        return last[which].seconds

    last: dict[str, Round] = {}
    found = interleave(
        lambda: timed("mine", mine), lambda: timed("plain", plain), pairs=pairs, progress=tick
    )
    require_same_result(name, last["mine"], last["plain"])
    return found


def figure(name: str, work: ManagerWorkload, pairs: Pairs, model: str) -> Figure:
    """Return the manager's share of the time."""
    ratio = pairs.ratio
    tokens = work.sequences * work.steps
    per_token = sorted(a - b for a, b in zip(pairs.first, pairs.second, strict=True))
    micros = 1e6 * per_token[len(per_token) // 2] / tokens
    return Figure(
        GROUP,
        name,
        f"{ratio.format(3)} times the decodes by hand",
        f"<= {LIMIT}",
        ratio.high <= LIMIT,
        f"{micros:.1f} us more per token",
        f"{len(pairs.first)} interleaved pairs of {work.sequences} x "
        f"({work.prompt} + {work.steps}) tokens, {model}, CPU time of 1 thread",
        {"managed": pairs.first, "by hand": pairs.second},
    )


def _context(model: pyllamakv.Model, work: ManagerWorkload) -> pyllamakv.Context:
    return model.context(
        n_ctx=work.n_ctx,
        n_batch=work.n_batch,
        n_ubatch=work.n_batch,
        n_seq_max=work.sequences,
        n_threads=1,
    )
