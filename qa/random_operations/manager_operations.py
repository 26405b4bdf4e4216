"""Run random operations on a cache manager, and compare logits with those of fresh evaluations.

The managers are a prefix cache that drops evicted branches, one that pages them out to files, one
with a store that is closed and reopened, with and without host memory in front of it, and slots. In
memories that keep states or windows, they reuse checkpoints. Leases are parked and resumed, and a
batcher with more requests than cells parks generations. Prompts have one of three salts, and must
reuse no more than prompts with it had in common.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from pyllamakv.cache import defrag_retry, slot_choice
from pyllamakv.cache.allocation import LOST_STATE
from pyllamakv.cache.batcher import MAX_DEFER, Batcher, GenerationQueue
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.eviction_policy import EvictionPolicyName
from pyllamakv.cache.interface import salt_digest
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.radix_tree import key_to_tokens
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    Cancelled,
    KVCacheFull,
    NoSlotAvailable,
    PagingError,
    ScenarioFailed,
    Unsupported,
    UsageError,
)
from pyllamakv.scenarios.reference import distance
from qa.random_operations.content_check import bound_of
from qa.random_operations.task import CheckCounts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.context import Context

#: All operations, with their weights.
WEIGHTS: Final[Mapping[str, int]] = {
    "start": 14, "go_on": 8, "end": 8, "cancel": 2, "park": 5, "resume": 6, "give_up": 1,
    "batch": 3, "pin": 2, "unpin": 1, "page": 2, "evict": 2, "flush": 2, "restart": 2, "verify": 3,
}  # fmt: skip

#: The longest prompt with its text: what a batch can evaluate at once.
LONGEST: Final = 90
#: Refusals that a manager may answer a request with while others have leases.
REFUSALS: Final = (KVCacheFull, NoSlotAvailable, PagingError)
#: Texts that later prompts begin with, and prefixes that the store is asked for after a restart.
PAST: Final = 12
ASKED: Final = 3


#: Salts of prompts.
SALTS: Final[tuple[str | None, ...]] = (None, "a", "b")


@dataclass
class HeldLease:
    """A lease, the tokens that its sequence must have, and the salt of its prompt."""

    lease: Any
    tokens: list[int]
    salt: str | None


@dataclass
class ParkedLease:
    """A parked lease, the tokens that it must continue, and the salt of its prompt."""

    parked: Any
    tokens: list[int]
    salt: str | None


def limits_of(context: Context) -> frozenset[str]:
    """Return the reasons with which a release refuses to start a recurrent sequence.

    docs/api.md lists the releases: some cannot start one in place of a removed one, and some not in
    a batch with others. The context must be empty, and is cleared.
    """
    if not context.info.memory.keeps_states:
        return frozenset()
    found = set()
    with context.sequence() as one, context.sequence() as other:
        context.decode(one.feed([3, 4]))
        try:
            context.step_all([one, other], [5, 6])
        except Unsupported as error:
            found.add(error.reason)
        try:
            # The library clears the memory with its last state.
            context.decode(other.feed([3, 4]))
            one.remove()
            context.decode(one.feed([3, 4]))
        except Unsupported as error:
            found.add(error.reason)
    context.clear()
    return frozenset(found - {""})


class ManagerOperations:
    """Operate a manager on ``context``; ``other`` is a similar one for fresh evaluations.

    ``kind`` is "prefix cache", "paged prefix cache", "prefix store" or "slot cache". ``seed``
    selects the options of the manager.
    """

    def __init__(self, context: Context, other: Context, kind: str, seed: int = 0) -> None:
        self.context, self.other, self.kind = context, other, kind
        self.bound = bound_of(context)
        #: Reasons with which this release may refuse a decode. A prefix cache pages branches out.
        release_limits = limits_of(other)
        #: Whether a pinned state keeps other recurrent sequences from starting.
        self._pins_block = bool(release_limits)
        self.limits = release_limits if kind == "slot cache" else frozenset()
        self.script: list[str] = []
        self.done: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.checks = CheckCounts()
        self._acted = False
        self._chance = Random(seed)
        self._files = tempfile.TemporaryDirectory(prefix="pyllamakv-managers-")
        self._past: list[list[int]] = [[3, 4, 5]]
        self._held: list[HeldLease] = []
        self._parked: list[ParkedLease] = []
        #: Salts and tokens of sequences that the store had when it was flushed.
        self._flushed: list[tuple[str | None, list[int]]] = []
        #: What was evaluated with each salt.
        self._served: dict[str | None, list[list[int]]] = {salt: [] for salt in SALTS}
        self._manager = self._make()
        limit = self._manager.size if isinstance(self._manager, SlotCache) else None
        if isinstance(self._manager, PrefixCache):
            limit = self._manager.max_sequence_tokens
        self._longest = min(LONGEST, (limit or LONGEST) - 8)

    def do(self, name: str, number: int) -> None:
        """Run one operation, and check the manager. Raises ScenarioFailed for a wrong result."""
        self._chance, self._acted = Random(number), False
        try:
            getattr(self, f"_{name}")()
        except REFUSALS as error:
            self._refuse(error)
        except Unsupported as error:
            # With nothing in the context, a manager can clear it and start.
            if error.reason not in self.limits or not any(map(len, self.context.ledgers)):
                raise
            self.ended["refused"] += 1
            self._drop_incomplete()
        finally:
            self.done[name] += self._acted
        self._check()

    def close(self) -> None:
        """Close the manager, the context, and the files."""
        try:
            self._manager.close()
        finally:
            self.context.close()
            self._files.cleanup()

    def _make(self) -> PrefixCache | SlotCache:
        schedule = CheckpointSchedule(
            size=self._chance.choice((4, 16, 64)), interval=self._chance.choice((8, 24)), first=4
        )
        few = self._chance.choice((None, None, 1, 3))
        if self.kind == "slot cache":
            size = self.context.info.n_ctx // self.context.partitions
            choice = self._chance.choice(get_args(slot_choice.Policy))
            return SlotCache(self.context, few, choice, size=size, checkpoints=schedule)
        # Host memory of few bytes, so that pages are dropped, of many, or none.
        host = self._chance.choice((0, 20_000, None))
        options: dict[str, Any] = {"entries": few, "paging": host}
        if self.kind == "paged prefix cache":
            options = {"paging": Path(self._files.name) / "pages"}
        elif self.kind == "prefix store":
            options = {"store": Path(self._files.name) / "store"}
        policy = self._chance.choice(get_args(EvictionPolicyName))
        if self.kind == "prefix store":
            options["paging"] = self._chance.choice((None, "memory", host))
        return PrefixCache(self.context, checkpoints=schedule, policy=policy, **options)

    # Leases...

    def _start(self) -> None:
        """Acquire a prompt that continues earlier tokens, and evaluate it."""
        prompt, salt = self._prompt(self._longest), self._chance.choice(SALTS)
        self._say("start", prompt=prompt, salt=salt)
        named = [self._chance.randrange(len(prompt))] if self._chance.random() < 0.3 else ()
        groups = self._groups(len(prompt))
        lease = self._manager.acquire(prompt, groups=groups, checkpoints=named, salt=salt)
        if any(first < lease.cached < end for first, end in groups):
            self._fail(f"{lease.cached} reused tokens end inside of a group of {groups}")
        self._evaluate(HeldLease(lease, prompt, salt))

    def _evaluate(self, held: HeldLease) -> None:
        """Evaluate the rest of a lease's tokens, and compare the logits."""
        self._held.append(held)
        reused = held.lease.cached
        self.ended["reused"] += reused
        if held.lease.sequence.tokens != held.tokens[:reused]:
            self._fail(f"{reused} reused tokens are not those of the prompt")
        self._check_salt(reused, held.tokens, held.salt, self._served[held.salt])
        self._served[held.salt].append(held.tokens)
        if isinstance(held.lease.rest, list) and hasattr(held.lease, "prefill"):
            held.lease.prefill()
        else:
            held.lease.decode()
        self._compare(held.lease.sequence.logits().copy(), held.tokens, reused)

    def _go_on(self) -> None:
        """Decode some more tokens of a lease."""
        held = self._choose(self._held)
        if held is None or len(held.tokens) >= self._longest:
            return
        more = self._tokens(self._chance.randint(1, self._longest - len(held.tokens)))[:16]
        self._say("go_on", tokens=more)
        self._decode(held, more)

    def _decode(self, held: HeldLease, more: list[int]) -> None:
        lease, before = held.lease, len(held.tokens)
        try:
            if hasattr(lease, "decode"):
                lease.decode(more)
            else:
                lease.make_room(len(more))
                feed = lease.sequence.feed(more)
                defrag_retry.decode_feed(self.context, feed, self._manager.relieve)
        finally:
            # A failure may come after a first batch.
            held.tokens = [*held.tokens, *more][: max(before, len(lease.sequence))]
        self._served[held.salt].append(held.tokens)
        lease.checkpoint()
        self._compare(lease.sequence.logits().copy(), held.tokens, before)

    def _end(self) -> None:
        """Release a lease."""
        held = self._choose(self._held)
        if held is not None:
            self._say("end", tokens=len(held.tokens))
            self._release(held)

    def _release(self, held: HeldLease) -> None:
        self._held.remove(held)
        self._past = [*self._past, held.tokens][-PAST:]
        held.lease.release()

    def _cancel(self) -> None:
        """Cancel the evaluation of a prompt after some polls; what was evaluated stays right."""
        polls = self._chance.randint(0, 40)
        self._say("cancel", polls=polls)
        self.context.native.cancel_after(self.context.handle, polls)
        try:
            self._start()
        except Cancelled:
            self.ended["aborted"] += 1
            held = self._held.pop()
            held.lease.release()
        finally:
            self.context.native.cancel_after(self.context.handle, -1)

    # Parking...

    def _park(self) -> None:
        held = self._choose(self._held)
        if held is not None:
            self._say("park", tokens=len(held.tokens))
            parked = held.lease.park()
            self._held.remove(held)
            self._parked.append(ParkedLease(parked, held.tokens, held.salt))

    def _resume(self) -> None:
        """Resume a parked lease with some more tokens."""
        one = self._choose(self._parked)
        if one is None:
            return
        tokens = [*one.tokens, *self._tokens(self._chance.randint(1, 4))]
        self._say("resume", tokens=len(tokens))
        lease = one.parked.resume(tokens)
        self._parked.remove(one)
        self._evaluate(HeldLease(lease, tokens, one.salt))

    def _give_up(self) -> None:
        one = self._choose(self._parked)
        if one is not None:
            self._say("give_up", tokens=len(one.tokens))
            self._parked.remove(one)
            one.parked.close()

    def _batch(self) -> None:
        """Generate for more prompts than fit at once; each completes with its own best tokens.

        Prompts wait for each other's prefixes within a bound, and have priorities.
        """
        while self._held:
            self._release(self._held[0])
        count = self._chance.randint(2, self.context.info.n_seq_max + 3)
        text = self._chance.randint(1, 16)
        most = self._longest - text
        prompts = [self._prompt(most) for _ in range(count)]
        if self._chance.random() < 0.5:  # a burst of one new prefix
            common = self._tokens(GenerationQueue.MIN_SHARED + 2)
            prompts = [[*common, *each][:most] for each in prompts]
        salts = [self._chance.choice(SALTS) for _ in prompts]
        self._say("batch", prompts=prompts, text=text, salts=salts)
        defer = self._chance.choice((0, 1, 4, MAX_DEFER))
        with Batcher(
            self._manager, max_wait=self._chance.choice((4, 16, 1000)), max_defer=defer
        ) as batcher:
            going = [
                batcher.submit(
                    each,
                    text,
                    groups=self._groups(len(each)),
                    salt=salt,
                    priority=self._chance.choice((0, 0, 1, -1)),
                    stop_at_end=False,
                )
                for each, salt in zip(prompts, salts, strict=True)
            ]
            cancelled = self._chance.choice(going) if self._chance.random() < 0.2 else None
            for _ in range(self._chance.randint(0, 20)):
                batcher.step()
            if cancelled is not None:
                cancelled.cancel()
            batcher.run()
            stats = batcher.stats()
        self.ended["parked"] += stats.parks
        # Each is an operation of the manager, with a result that is compared below.
        self.done["batch request"] += count
        self.done["batch park"] += stats.parks
        self.done["batch resume"] += stats.resumes
        self.ended["deferred"] += sum(one.deferred > 0 for one in going)
        if (longest := max(one.deferred for one in going)) > defer:
            self._fail(f"a generation was deferred for {longest} steps, and the bound is {defer}")
        whole = [[*one.prompt, *one.tokens] for one in going]
        for i, (one, salt) in enumerate(zip(going, salts, strict=True)):
            others = [each for j, each in enumerate(whole) if j != i and salts[j] == salt]
            known = [*self._served[salt], *others]
            self._check_salt(one.usage.reused, one.prompt, salt, known)
        for tokens, salt in zip(whole, salts, strict=True):
            self._served[salt].append(tokens)
        for prompt, one in zip(prompts, going, strict=True):
            if one.finish_reason == "cancelled" and one is cancelled:
                continue
            limited = isinstance(one.error, Unsupported) and one.error.reason in self.limits
            pinned = isinstance(one.error, NoSlotAvailable) and self._pins_fill
            if limited or pinned:
                self.ended["refused"] += 1
                continue
            if one.finish_reason != "length" or len(one.tokens) != text:
                self._fail(
                    f"a generation of {text} tokens ended with {one.finish_reason} after "
                    f"{len(one.tokens)}: {one.error}"
                )
            self._past = [*self._past, [*prompt, *one.tokens[:-1]]][-PAST:]
            self._check_text(prompt, one.tokens)

    def _check_text(self, prompt: list[int], text: list[int]) -> None:
        """Check that each generated token is the most likely one, but for the noise."""
        self.other.clear()
        with self.other.sequence() as fresh:
            self.other.decode(fresh.feed([*prompt, *text[:-1]], "all"))
            rows = self.other.logits_all()[len(prompt) - 1 :].copy()
        for place, (row, token) in enumerate(zip(rows, text, strict=True)):
            far = float(row.max() - row[token])
            if far > 2 * self.bound:
                self._fail(f"token {place} of a generation is {far:.3g} below the best", "data")
            self.checks.logits += 1

    # What stays...

    def _pin(self) -> None:
        if isinstance(self._manager, PrefixCache):
            tokens = self._choose(self._past) or [3]
            self._say("pin", tokens=len(tokens))
            # Not everything of the past is still in the cache, or has a state there.
            try:
                with suppress(UsageError):
                    salt = self._chance.choice(SALTS)
                    self._manager.pin(self._chance.choice("ab"), tokens, salt=salt)
            except Unsupported as error:
                if error.reason != LOST_STATE:
                    raise

    def _unpin(self) -> None:
        if isinstance(self._manager, PrefixCache) and self._pins:
            self._say("unpin")
            self._manager.unpin(self._chance.choice(self._pins))

    def _page(self) -> None:
        """Page a branch out or in."""
        if self.kind != "paged prefix cache" or not isinstance(self._manager, PrefixCache):
            return
        tokens = self._choose(self._past) or [3]
        self._say("page", tokens=len(tokens))
        salt = self._chance.choice(SALTS)
        with suppress(UsageError):
            if self._chance.random() < 0.7:
                self._manager.page_out(tokens, salt=salt)
            else:
                self._manager.page_in(tokens, salt=salt)

    def _evict(self) -> None:
        self._say("evict")
        if isinstance(self._manager, PrefixCache) and self._chance.random() < 0.5:
            self._manager.evict()
        else:
            self._manager.relieve()

    def _flush(self) -> None:
        if self.kind == "prefix store" and isinstance(self._manager, PrefixCache):
            self._say("flush")
            found = self._sequences()
            self._manager.flush()
            self._flushed = [*self._flushed, *found][-PAST:]

    def _restart(self) -> None:
        """Close the manager and empty the context; a store has everything that it had."""
        self._say("restart")
        if self.kind == "prefix store":
            self._flushed = [*self._flushed, *self._sequences()][-PAST:]
        self._held.clear()
        self._parked.clear()
        self._manager.close()
        self.context.clear()
        self._manager = self._make()
        for salt, tokens in self._chance.sample(self._flushed, min(ASKED, len(self._flushed))):
            prompt = [*tokens, *self._tokens(1)]
            lease = self._manager.acquire(prompt, salt=salt)
            reused = lease.cached
            self._evaluate(HeldLease(lease, prompt, salt))
            self._release(self._held[-1])
            if reused != len(tokens):
                self._fail(f"{reused} of {len(tokens)} flushed tokens were reused", "lost")

    def _sequences(self) -> list[tuple[str | None, list[int]]]:
        """Return salts and tokens of what a flush writes, if a prompt may follow them."""
        assert isinstance(self._manager, PrefixCache)
        self._manager.sync()
        salts = {salt_digest(salt): salt for salt in SALTS}
        found = [
            (salts[node.salt], key_to_tokens(node.key))
            for node in self._manager.branches.tree.walk()
            if node.entry is not None or node.leases
        ]
        # Some releases report a state of one token as empty.
        return [each for each in found if 1 < len(each[1]) < self._longest]

    def _verify(self) -> None:
        """Decode one more token with each lease, and compare its logits."""
        self._say("verify")
        for held in list(self._held):
            if len(held.tokens) <= self._longest:
                with suppress(*REFUSALS):
                    self._decode(held, self._tokens(1))

    # Checks...

    def _check(self) -> None:
        """Check the manager's invariants, and the tokens of all leases."""
        try:
            self._manager.check()
        except AssertionError as error:
            self._fail(f"the manager is inconsistent: {error}")
        for held in list(self._held):
            tokens = held.lease.sequence.tokens
            if not tokens and self.context.info.memory.keeps_states:
                # A cancelled decode destroyed the states of other sequences.
                self._held.remove(held)
                held.lease.release()
            elif tokens != held.tokens[: len(tokens)] or len(tokens) != len(held.tokens):
                self._fail(f"a lease of {len(held.tokens)} tokens has {len(tokens)}, or others")

    def _check_salt(
        self, reused: int, prompt: list[int], salt: str | None, served: Sequence[list[int]]
    ) -> None:
        """Check that what a prompt reuses was evaluated with its salt."""
        most = max((slot_choice.count_common(each, prompt) for each in served), default=0)
        if reused > most:
            self._fail(f"{reused} tokens were reused, and {most} evaluated with salt {salt!r}")

    def _compare(self, mine: NDArray[np.float32], tokens: Sequence[int], reused: int) -> None:
        """Compare logits with those of a fresh evaluation of all tokens."""
        self.other.clear()
        with self.other.sequence() as fresh:
            fresh.prefill(tokens)
            far = distance(mine, self.other.logits().copy())
        if far > self.bound:
            self._fail(
                f"logits after {len(tokens)} tokens, {reused} of them reused, differ by {far:.3g} "
                f"from a fresh evaluation, allowed {self.bound:g}",
                "data",
            )
        self.checks.logits += 1

    @property
    def _pins_fill(self) -> bool:
        """Return whether pinned prefixes may leave no sequence to others."""
        if not self._pins or not isinstance(self._manager, PrefixCache):
            return False
        return self._pins_block or len(self._pins) >= self._manager.branches.limit

    @property
    def _pins(self) -> list[str]:
        return sorted(self._manager.pins) if isinstance(self._manager, PrefixCache) else []

    def _refuse(self, error: Exception) -> None:
        """Accept a refusal while others have leases; a lease without its prompt is released."""
        self.ended[type(error).__name__] += 1
        alone = not self._parked and all(
            len(each.lease.sequence) < len(each.tokens) for each in self._held
        )
        if alone and not self._pins:
            self._fail(f"refused although nothing else is leased: {error}")
        self._drop_incomplete()

    def _drop_incomplete(self) -> None:
        """Release the leases whose tokens could not all be decoded."""
        for held in [each for each in self._held if len(each.lease.sequence) < len(each.tokens)]:
            self._held.remove(held)
            held.lease.release()

    # Arguments...

    def _prompt(self, most: int) -> list[int]:
        """Return a prompt of at most ``most`` tokens that continues a part of earlier ones."""
        base = self._chance.choice(self._past)
        kept = base[: self._chance.randint(0, len(base))] if self._chance.random() < 0.6 else base
        kept = kept[: most - 1]
        return [*kept, *self._tokens(self._chance.randint(1, min(48, most - len(kept))))]

    def _groups(self, n: int) -> list[tuple[int, int]]:
        """Return ranges of a prompt that belong together, mostly none."""
        if n < 4 or self._chance.random() < 0.8:
            return []
        ends = sorted(self._chance.sample(range(n + 1), 4))
        return [(ends[0], ends[1]), (ends[2], ends[3])]

    def _tokens(self, n: int) -> list[int]:
        return [self._chance.randrange(3, 60) for _ in range(n)]

    def _choose(self, found: Sequence[Any]) -> Any:
        return self._chance.choice(found) if found else None

    def _say(self, name: str, **words: Any) -> None:
        self._acted = True
        self.script.append(json.dumps({"op": "note", "text": f"{name} {json.dumps(words)}"}))

    def _fail(self, message: str, failure: str = "claim") -> None:
        raise ScenarioFailed(message, failure=failure)
