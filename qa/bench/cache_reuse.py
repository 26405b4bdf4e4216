"""Measure how much of prompts the cache managers reuse, and what an overcommitted cache completes.

The workload is chats with a few system prompts: each turn sends the whole chat again, and some
turns are repeated or changed. The possible reuse of a prompt is the longest prefix that an ideal
cache of unlimited capacity has: with attention, of any earlier sequence; with states, up to an end
of an earlier prompt or text, a multiple of the interval, or a length at which an earlier prompt
diverged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyllamakv
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.prefix_states import SCHEDULE
from pyllamakv.cache.prefix_tree import TOKEN_BYTES, common, tokens_to_key
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.scenarios import synthetic_models
from qa.bench.figure import Figure

GROUP = "Reuse"
Tick = Callable[[], None]

#: Models, one of each type of memory.
MODELS = ("tiny", "sliding", "recurrent", "hybrid")
#: Minimum share of the possible reuse.
TARGET = 0.99
#: Cells and sequences of the overcommitted context, tokens of a request, and times the cells.
CELLS, SEQUENCES, PROMPT, TEXT, FACTORS = 256, 4, 64, 64, (2, 4, 8)


@dataclass(frozen=True)
class Chats:
    """A workload: ``chats`` of ``turns`` each, over three system prompts."""

    chats: int = 8
    turns: int = 5
    system: int = 150
    text: int = 12


def figures(tick: Tick, spec: str = "0.3.36+patched", work: Chats | None = None) -> list[Figure]:
    """Measure the reuse of each type of memory, then overcommitted caches."""
    found = []
    with pyllamakv.open(spec) as library:
        for name in MODELS:
            with library.load_model(synthetic_models.model(name)) as model:
                found.append(reuse(model, name, work or Chats(), tick))
                for factor in FACTORS:
                    for manager in (PrefixCache, SlotCache):
                        found.append(overcommit(model, name, manager, factor, tick))
    return found


def reuse(model: pyllamakv.Model, name: str, work: Chats, tick: Tick) -> Figure:
    """Run the chats through a batcher, and compare the reused tokens with the possible ones."""
    ideal = Ideal(whole=name == "tiny")
    prompts = reused = possible = best = 0
    with (
        model.context(n_ctx=8192, n_batch=256, n_ubatch=64, n_seq_max=4) as context,
        PrefixCache(context, paging="memory") as cache,
        Batcher(cache) as batcher,
    ):

        def serve(prompt: list[int]) -> list[int]:
            nonlocal prompts, reused, possible, best
            tick()
            prompts += len(prompt)
            one = batcher.submit(prompt, work.text, stop_at_end=False)
            batcher.run()
            assert one.cached is not None, one.error
            reused += one.cached
            possible += ideal.possible(prompt)
            best += ideal.longest(prompt)
            ideal.add(prompt, one.tokens)
            return one.tokens

        run_chats(work, serve)
        stats = cache.stats()
    share = reused / possible
    return Figure(
        GROUP,
        f"chats, `{name}` ({context_memory(model)})",
        f"{share:.1%} of the possible reuse",
        f">= {TARGET:.0%}",
        share >= TARGET,
        f"{reused / best:.1%} of what attention could reuse",
        f"`Batcher` over `PrefixCache` with paging, {prompts} prompt tokens, {reused} reused, "
        f"{stats.evaluated_tokens} evaluated, {stats.bytes / 1e6:.1f} MB",
        {"reused": reused, "possible": possible, "with attention": best, "prompts": prompts},
    )


def context_memory(model: pyllamakv.Model) -> str:
    """Return the type of a model's memory."""
    with model.context(n_ctx=256) as context:
        return context.info.memory.name.lower()


def run_chats(work: Chats, serve: Callable[[list[int]], list[int]]) -> None:
    """Send every turn of the chats, interleaved; repeat a tenth and change a fifth of them."""
    draw = random.Random(1)

    def some(n: int) -> list[int]:
        return [draw.randint(1, 60) for _ in range(n)]

    systems = [some(work.system) for _ in range(3)]
    chats = [list(systems[number % 3]) for number in range(work.chats)]
    for _ in range(work.turns):
        for chat in draw.sample(chats, len(chats)):
            asked = [*chat, *some(draw.randint(5, 30))]
            answer = serve(asked)
            kind = draw.random()
            if kind < 0.1:
                answer = serve(asked)
            elif kind < 0.3:
                asked = [*chat, *some(10)]
                answer = serve(asked)
            chat[:] = [*asked, *answer]


class Ideal:
    """A cache of unlimited capacity; with ``whole`` False, only states can be reused."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._seen: list[bytes] = []
        self._states: set[bytes] = set()

    def longest(self, prompt: list[int]) -> int:
        """Return how much of a prompt, but its last token, an earlier sequence has."""
        key = tokens_to_key(prompt)
        found = max((common(each, key) for each in self._seen), default=0)
        return min(found, len(prompt) - 1)

    def possible(self, prompt: list[int]) -> int:
        """Return how much of a prompt can be reused."""
        if self._whole:
            return self.longest(prompt)
        key = tokens_to_key(prompt)
        lengths = (
            n for n in range(len(prompt) - 1, 0, -1) if key[: n * TOKEN_BYTES] in self._states
        )
        return next(lengths, 0)

    def add(self, prompt: list[int], text: list[int]) -> None:
        """Add a prompt and the text that followed; the last token of the text is not decoded."""
        key = tokens_to_key([*prompt, *text[:-1]])
        lengths = {len(prompt) - 1, len(prompt) + len(text) - 1}
        lengths |= {common(each, key) for each in self._seen}
        lengths |= set(range(SCHEDULE.interval, len(prompt), SCHEDULE.interval))
        self._states |= {key[: n * TOKEN_BYTES] for n in lengths if n >= SCHEDULE.first}
        self._seen.append(key)


def overcommit(
    model: pyllamakv.Model,
    name: str,
    manager: type[PrefixCache] | type[SlotCache],
    factor: int,
    tick: Tick,
) -> Figure:
    """Submit requests with ``factor`` times the cells of the cache at once; compare with alone."""
    n = factor * CELLS // (PROMPT + TEXT)
    prompts = [[1 + (13 * number + 7 * i) % 60 for i in range(PROMPT)] for number in range(n)]
    options: dict[str, Any] = {"n_ctx": CELLS, "n_batch": 64, "n_ubatch": 32}
    alone = []
    with model.context(**options) as context:
        for prompt in prompts:
            tick()
            context.clear()
            with PrefixCache(context) as cache, Batcher(cache) as batcher:
                alone.append(tokens_of(batcher, [prompt])[0])
    with model.context(**options, n_seq_max=SEQUENCES) as context:
        made = PrefixCache(context) if manager is PrefixCache else SlotCache(context, size=CELLS)
        with made, Batcher(made, max_wait=TEXT // 2) as batcher:
            together = tokens_of(batcher, prompts)
            tick()
            stats = batcher.stats()
    done = sum(len(each) == TEXT for each in together)
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    needed = n * (PROMPT + TEXT - 1)
    return Figure(
        GROUP,
        f"{factor} times the cells, `{manager.__name__}`, `{name}`",
        f"{done} of {n} complete, {same} with the tokens as alone",
        "all",
        done == same == n,
        "",
        f"{n} requests of {PROMPT} + {TEXT} tokens at once, {CELLS} cells, {SEQUENCES} sequences; "
        f"{stats.parks} parked, {stats.decoded_tokens / needed:.3f} times the tokens evaluated",
        {"parks": stats.parks, "decoded": stats.decoded_tokens, "needed": needed},
    )


def tokens_of(batcher: Batcher, prompts: Iterable[list[int]]) -> list[list[int]]:
    """Generate for all prompts at once; return the tokens of each."""
    going = [batcher.submit(each, TEXT, stop_at_end=False) for each in prompts]
    batcher.run()
    return [one.tokens for one in going]
