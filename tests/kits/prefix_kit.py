"""Run random operations on a prefix cache, and check it after each."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import runtime_kit as kit

from pyllamakv.cache.interface import salt_digest
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_choice import count_common
from pyllamakv.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyllamakv.cache.lease import ParkedPrefix, PrefixLease
    from pyllamakv.runtime.context import Context


SYSTEM = [10 + i % 40 for i in range(20)]


def make(folder: Path, **options: Any) -> PrefixCache:
    """Create a cache; context options are passed to the context."""
    names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "native")
    context = {name: options.pop(name) for name in names if name in options}
    return PrefixCache(kit.context(folder, **{"n_ctx": 128, **context}), **options)


def used(cache: PrefixCache) -> int:
    """Count the used cells."""
    return cache.context.kv.stats.used


def leaves(cache: PrefixCache) -> set[bytes]:
    """Return the tokens of every branch, leased ones as far as they are decoded."""
    cache.sync()
    return {node.key for node in cache.branches.tree.walk() if not node.children}


def feed(lease: PrefixLease, tokens: list[int] | None = None) -> PrefixLease:
    """Decode the rest of a lease's prompt, and more tokens after it."""
    lease.prefill()
    if tokens:
        lease.sequence.prefill(tokens)
    return lease


def serve(cache: PrefixCache, prompt: list[int], answer: list[int] | None = None) -> int:
    """Serve one prompt with a given answer, and return how much of it was cached."""
    with cache.acquire(prompt) as lease:
        if answer:
            lease.make_room(len(answer))
        feed(lease, answer)
    cache.check()
    return lease.cached


class Traffic:
    """Acquire, decode, release, park, pin, page and evict at random; ``errors`` counts refusals.

    Each prompt has one of ``salts``, and must reuse no more than prompts with it had in common. A
    refusal must leave every branch that was there. ``look`` is called after each prompt whose
    last token was decoded.
    """

    def __init__(
        self,
        context: Context,
        seed: int,
        *,
        tokens: range = range(3, 10),
        salts: tuple[str | None, ...] = (None,),
        look: Callable[[PrefixLease], None] | None = None,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.tokens = tokens
        self.look = look
        self.cache = PrefixCache(context, **options)
        self.leases: list[tuple[PrefixLease, list[int]]] = []
        self.parked: list[tuple[ParkedPrefix, list[int]]] = []
        self.parking = random.Random(seed)
        self.past = [[3, 4, 5]]
        self.salting, self.salts = random.Random(seed), salts
        #: The tokens of all prompts and texts of each salt.
        self.served: dict[bytes, list[list[int]]] = {salt_digest(salt): [] for salt in salts}
        self.errors: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        """Run this number of operations, then release all leases."""
        for _ in range(steps):
            for act in (self.step, self.park):
                before = leaves(self.cache)
                try:
                    act()
                except KvError as error:
                    self.errors[type(error).__name__] += 1
                    after = leaves(self.cache)
                    assert all(any(now.startswith(old) for now in after) for old in before), error
                    self.cache.enforce(0)  # a refusal may leave more pages than allowed
                self.cache.check()
                assert self.cache.branches.surplus() is None
        while self.leases:
            self.leases.pop()[0].release()
        while self.parked:
            self.parked.pop()[0].close()
        self.cache.check()
        assert not any(node.parked for node in self.cache.branches.tree.walk())

    def park(self) -> None:
        """Park a lease, or resume one or give one up, now and then."""
        draw = self.parking
        kind = draw.random()
        if kind < 0.08 and self.leases:
            lease, _ = self.leases.pop(draw.randrange(len(self.leases)))
            tokens = lease.sequence.tokens
            self.parked.append((lease.park(), tokens))
        elif kind < 0.2 and self.parked:
            parked, tokens = draw.choice(self.parked)
            prompt = [*tokens, *(draw.choice(self.tokens) for _ in range(draw.randint(1, 5)))]
            lease = parked.resume(prompt)
            self.look_at_salt(lease, prompt)
            self.parked = [each for each in self.parked if each[0] is not parked]
            self.leases.append((lease, prompt))
        elif kind < 0.22 and self.parked:
            self.parked.pop(draw.randrange(len(self.parked)))[0].close()

    def step(self) -> None:
        """Do one operation."""
        draw, cache = self.random, self.cache
        kind = draw.random()
        if kind < 0.35:
            base = draw.choice(self.past)
            prompt = [*base[: draw.randint(0, len(base))], *self.some(draw.randint(0, 20))]
            lease = cache.acquire(prompt, salt=self.salting.choice(self.salts))
            self.look_at_salt(lease, prompt)
            self.leases.append((lease, prompt))
        elif kind < 0.7 and self.leases:
            self.go_on(*draw.choice(self.leases))
        elif kind < 0.9 and self.leases:
            lease, _ = self.leases.pop(draw.randrange(len(self.leases)))
            self.past.append(lease.sequence.tokens or [3])
            lease.release()
        elif kind < 0.94:
            tokens = draw.choice(self.past)
            name, length = draw.choice("ab"), draw.randint(1, len(tokens))
            cache.pin(name, tokens[:length], salt=self.salting.choice(self.salts))
        elif kind < 0.97 and cache.pins:
            cache.unpin(draw.choice(list(cache.pins)))
        elif kind < 0.98:
            cache.evict()

    def go_on(self, lease: PrefixLease, prompt: list[int]) -> None:
        """Decode a part of a prompt, or of an answer."""
        done = len(lease.sequence)
        if done < len(prompt):
            tokens = prompt[done : done + self.random.randint(1, len(prompt) - done)]
        else:
            tokens = self.some(self.random.randint(1, 10))
            lease.make_room(len(tokens))
        lease.sequence.prefill(tokens)
        self.served[lease.salt].append(lease.sequence.tokens)
        assert lease.sequence.tokens[: len(prompt)] == prompt[: len(lease.sequence)]
        if self.look is not None and len(lease.sequence) >= len(prompt):
            self.look(lease)

    def look_at_salt(self, lease: PrefixLease, prompt: list[int]) -> None:
        """Check that what a prompt reuses was decoded with its salt."""
        lengths = (count_common(tokens, prompt) for tokens in self.served[lease.salt])
        assert lease.cached <= max(lengths, default=0)

    def some(self, n: int) -> list[int]:
        """Return random tokens."""
        return [self.random.choice(self.tokens) for _ in range(n)]
