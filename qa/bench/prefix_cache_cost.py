"""Measure the cost of the prefix cache, and its savings.

Its overhead is measured against the same sequences managed manually: the same tokens are decoded in
the same company, with one thread, and the clock is the CPU time of that thread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count

import pyllamakv
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.prefix_tree import PrefixTree, tokens_to_key
from qa.bench.figure import Figure
from qa.bench.loop import model_file
from qa.bench.measure import MINIMUM_PAIRS, Pairs, clock, interleave, interval

GROUP = "Prefixes"
Tick = Callable[[], None]

ENTRIES, LENGTH = 1000, 4096
#: Maximum seconds of a lookup, and maximum share of a decode that the cache adds to each token.
LOOKUP, OVERHEAD = 1e-3, 0.05
#: Tokens of a prompt, of which the first may be shared, and of the answer.
PROMPT, SHARED, ANSWER = 64, 48, 128
SEQUENCES = 8


def figures(tick: Tick, spec: str = "0.3.9+patched", pairs: int = MINIMUM_PAIRS) -> list[Figure]:
    """Measure lookups in the tree alone, then the cache with a model of 260 thousand parameters."""
    found = [_lookup(name, keys, tick) for name, keys in _trees().items()]
    with pyllamakv.open(spec) as library, library.load_model(model_file()) as model:
        for shared in (0, SHARED):
            found.append(_overhead(model, shared, pairs, tick))
        found.append(_cells(model))
        found += [_saved(model, where, pairs, tick) for where in ("cached", "paged to memory")]
    return found


# Lookups...


def _trees() -> dict[str, list[bytes]]:
    draw = random.Random(1)

    def some(n: int) -> list[int]:
        return [draw.randrange(32000) for _ in range(n)]

    trunk = some(LENGTH)
    half = LENGTH // 2
    step = LENGTH // ENTRIES
    shapes = {
        "nothing in common": (some(LENGTH) for _ in range(ENTRIES)),
        "half in common": ([*trunk[:half], *some(LENGTH - half)] for _ in range(ENTRIES)),
        "each diverges later": (
            [*trunk[: step * i], *some(LENGTH - step * i)] for i in range(ENTRIES)
        ),
    }
    return {name: [tokens_to_key(tokens) for tokens in made] for name, made in shapes.items()}


def _lookup(name: str, keys: list[bytes], tick: Tick) -> Figure:
    tree = PrefixTree()
    for key in keys:
        tree.insert(key)
    prompts = [list(memoryview(key).cast("i")) for key in keys[:: len(keys) // 20]]
    prompts = [[*prompt[:-1], 7] for prompt in prompts]
    times: list[float] = []
    for prompt in prompts * 5:
        times.append(clock(lambda prompt=prompt: tree.match(tokens_to_key(prompt))))  # type: ignore[misc]
    tick()
    worst = max(statistics.median(times[i :: len(prompts)]) for i in range(len(prompts)))
    return Figure(
        GROUP,
        f"find the longest prefix among {ENTRIES} entries of {LENGTH} tokens, {name}",
        f"{interval(times).median * 1e6:.0f} us, {worst * 1e6:.0f} us for the slowest prompt",
        f"<= {LOOKUP * 1e3:.0f} ms",
        worst <= LOOKUP,
        f"{_packing(prompts[0]) * 1e6:.0f} us to turn a list of numbers into an array",
        f"{len(prompts)} prompts of {LENGTH} tokens, {tree.nodes} nodes, median of 5",
        {"seconds": times},
    )


def _packing(prompt: list[int]) -> float:
    return statistics.median(clock(lambda: tokens_to_key(prompt)) for _ in range(20))


# Overhead...


def _prompts(shared: int) -> Iterator[list[int]]:
    """Yield prompts with exactly ``shared`` common tokens."""
    for number in count():
        digits = [3 + number // 16**place % 16 for place in (0, 1, 2, 3)]
        yield [7] * shared + digits + [11 + i % 400 for i in range(PROMPT - shared - len(digits))]


def _overhead(model: pyllamakv.Model, shared: int, pairs: int, tick: Tick) -> Figure:
    options = {"n_ctx": 2048, "n_batch": 512, "n_seq_max": SEQUENCES, "n_threads": 1}
    with (
        model.context(**options) as one,  # type: ignore[arg-type]
        model.context(**options) as other,  # type: ignore[arg-type]
        model.sampler() as sampler,
    ):
        cache = PrefixCache(one)
        mine, theirs = _prompts(shared), _prompts(shared)
        kept: list[pyllamakv.Sequence] = []

        def managed() -> float:
            prompt, begin = next(mine), time.thread_time()
            with cache.acquire(prompt) as lease:
                sequence, context = lease.sequence, one
                context.prefill(sequence, lease.rest)
                token = sampler.sample(context)
                for _ in range(ANSWER):
                    lease.make_room(1)
                    context.step(sequence, token)
                    token = sampler.sample(context)
            return time.thread_time() - begin

        def by_hand() -> float:
            prompt, begin = next(theirs), time.thread_time()
            if len(kept) == SEQUENCES:
                kept.pop(0).close()
            cached = shared if kept else 0
            sequence = kept[-1].fork(shared) if cached else other.sequence()
            other.prefill(sequence, prompt[cached:])
            token = sampler.sample(other)
            for _ in range(ANSWER):
                other.step(sequence, token)
                token = sampler.sample(other)
            kept.append(sequence)
            return time.thread_time() - begin

        for _ in range(SEQUENCES):  # both are full from here on
            managed()
            by_hand()
        times = interleave(managed, by_hand, pairs=pairs, progress=tick)
        cache.check()
        hits = cache.stats().hits
    what = f"{shared} of them cached" if shared else "none of them cached"
    return _ratio(times, f"a prompt of {PROMPT} tokens, {what}, and {ANSWER} more", hits)


def _ratio(times: Pairs, what: str, hits: int) -> Figure:
    ratio, tokens = times.ratio, PROMPT + ANSWER
    extra = interval([(a - b) / tokens for a, b in zip(times.first, times.second, strict=True)])
    return Figure(
        GROUP,
        f"{what}: with the cache over by hand",
        f"{ratio.format(3)} x, {extra.median * 1e6:.2f} us per token",
        f"<= {1 + OVERHEAD}",
        ratio.high <= 1 + OVERHEAD,
        "1: the same decodes beside the same sequences",
        f"{len(times.first)} interleaved pairs, {SEQUENCES} sequences, 1 thread, {hits} hits",
        {"managed": times.first, "by hand": times.second},
    )


# Savings...


def _cells(model: pyllamakv.Model) -> Figure:
    common, tails = [3 + i % 400 for i in range(1000)], (20, 30)
    with model.context(n_ctx=2048, n_batch=512, n_seq_max=4) as context:
        cache = PrefixCache(context)
        for number, tail in enumerate(tails):
            with cache.acquire([*common, *[5 + number] * tail]) as lease:
                lease.prefill()
        used = context.kv.stats.used
    expected = len(common) + sum(tails)
    return Figure(
        GROUP,
        f"two chats with {len(common)} tokens in common, tails of {tails[0]} and {tails[1]}",
        f"{used} cells",
        f"{expected}",
        used == expected,
        "",
        "counted from the cells",
        {"cells": used},
    )


def _saved(model: pyllamakv.Model, where: str, pairs: int, tick: Tick) -> Figure:
    prompt = [3 + i % 400 for i in range(1000)]
    options = {"n_ctx": 2048, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 4, "n_threads": 1}
    with model.context(**options) as one, model.context(**options) as other:  # type: ignore[arg-type]
        cache = PrefixCache(one, paging="memory")

        def hit() -> float:
            if where == "paged to memory" and cache.stats().hits + cache.stats().misses:
                cache.page_out(prompt)
            begin = time.thread_time()
            with cache.acquire(prompt) as lease:
                lease.prefill()
                return time.thread_time() - begin

        def fresh() -> float:
            begin = time.thread_time()
            with other.sequence() as sequence:
                other.prefill(sequence, prompt)
                return time.thread_time() - begin

        hit()
        times = interleave(hit, fresh, pairs=pairs, progress=tick)
    ratio = times.ratio
    return Figure(
        GROUP,
        f"a prompt of {len(prompt)} tokens of which all but one are {where}, over decoding it",
        f"{ratio.format(3)} x, {interval(times.first).median * 1e3:.2f} ms",
        "< 1",
        ratio.high < 1,
        "",
        f"{pairs} interleaved pairs, 1 thread",
        {"hit": times.first, "fresh": times.second},
    )
