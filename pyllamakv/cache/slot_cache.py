"""Manage several conversations in one context: a slot each, with shared common prefixes.

A slot is a sequence with its list of tokens. The list changes only after the library has
confirmed the operation. After a decode that fails or is cancelled, the slots and the cache
therefore contain the same tokens. A full slot is shifted: its first tokens stay, and half of the
tokens after them are removed at once, so that not every token causes a shift.

This module chooses a slot for each prompt, and shifts full slots. `residency` has the rules of each
kind of memory: where a sequence can continue, which states are saved and evicted, and when a
sequence can start. A slot keeps its sequence, so that the residency's tree has saved states only.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.cache import defrag_retry, prefix_states, residency, slot_choice
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.defrag_retry import CellUsage
from pyllamakv.cache.inspection import agree, check_ledgers
from pyllamakv.cache.interface import PARKED_LATE, salt_digest
from pyllamakv.cache.lease import SequenceLease
from pyllamakv.cache.radix_tree import NO_SALT, TOKEN_BYTES, key_to_tokens, tokens_to_key
from pyllamakv.cache.reuse_counts import DepthCounts
from pyllamakv.cache.tier import MemoryTier
from pyllamakv.closing import ClosedOnExit, NotCopied
from pyllamakv.errors import (
    Cancelled,
    Closed,
    KVCacheFull,
    NativeError,
    NoSlotAvailable,
    PagingError,
    PartialRemovalRefused,
    ReprocessNeeded,
    StateError,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.context import Context

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.cache.checkpoints import CheckpointSchedule
    from pyllamakv.cache.prefix_states import PrefillBackups, StatePoints
    from pyllamakv.cache.slot_choice import Policy
    from pyllamakv.cache.tier import Page, PageTier
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.model import Model

_log = logging.getLogger("pyllamakv.cache")


class SlotCache(ClosedOnExit):
    """Manage the cache of a context as slots.

    There are ``n_slots`` slots (None: as many as the context has sequences) of ``size`` tokens
    (None: cells divided by slots). With a larger size, slots overcommit the cells, and the least
    recently used history is evicted. With the ``policy`` "best", a prompt
    reuses a slot only if that discards no cached tokens; with "longest", if at least half of the
    slot's tokens match. A shift keeps the first ``keep`` tokens of a prompt; negative: all of it.
    The model's first token is not counted.

    A memory that cannot return to every position continues after states in host memory.
    ``checkpoints`` defines their interval, their number and their bytes in all slots together.
    None: every 512 tokens, up to 1 GiB.
    """

    def __init__(
        self,
        context: Context,
        n_slots: int | None = None,
        policy: Policy = "best",
        keep: int = 0,
        *,
        size: int | None = None,
        checkpoints: CheckpointSchedule | None = None,
    ) -> None:
        arguments.instance("context", context, Context, "a Context")
        n_slots = arguments.whole_or_none("n_slots", n_slots)
        size = arguments.whole_or_none("size", size)
        n = context.info.n_seq_max if n_slots is None else n_slots
        if not 1 <= n <= context.info.n_seq_max:
            msg = (
                f"n_slots must be from 1 to {context.info.n_seq_max} (the context's n_seq_max), "
                f"not {arguments.shown(n)}"
            )
            raise UsageError(msg)
        self.context = context
        self.policy = slot_choice.checked(policy)
        self.keep = arguments.integer("keep", keep)
        cells = context.info.n_ctx // context.partitions
        self.size = (cells if context.partitions > 1 else cells // n) if size is None else size
        if not 2 <= self.size <= cells:
            msg = (
                f"a slot must have from 2 to {cells} tokens here, not {arguments.shown(self.size)}"
            )
            raise UsageError(msg)
        self._cells = cells
        schedule = prefix_states.checked_schedule(checkpoints)
        #: The saved states of prefixes, and the rules of this kind of memory.
        self.branches = residency.kind_of(context)(context, n, None, schedule)
        self._emptyings = context.decoder.emptyings
        self._counts = SlotCounts()
        self._clock = 0
        self._closed = False
        self._slots: list[Slot] = []
        self._parked: weakref.WeakSet[ParkedSlot] = weakref.WeakSet()
        #: Where parked slots are saved.
        self._parking = MemoryTier()
        try:
            while len(self._slots) < n:
                self._slots.append(Slot(context.sequence()))
        except BaseException:
            self.close()
            raise
        #: Whether the slots together can need more cells than the context has.
        self.overcommits = context.partitions == 1 and (
            n * self.size > cells or n < context.info.n_seq_max
        )
        #: The states of unfinished prompts, which are used after a cancel.
        self.backups = prefix_states.PrefillBackups(self.branches, self._leases)
        context.keepers.add(self)

    @property
    def max_sequence_tokens(self) -> int:
        """The maximum number of tokens of a sequence: the size of a slot."""
        return self.size

    def acquire(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        checkpoints: Iterable[int] = (),
        salt: str | None = None,
        keep: int | None = None,
    ) -> SlotLease:
        """Return a lease on a slot for a prompt, with the longest prefix that a slot or state has.

        At least one token is left to evaluate. ``keep`` is as in the class. ``checkpoints`` are
        lengths of the prompt after which a state is kept, if the memory cannot return there. Only
        prompts with the same ``salt`` share histories and states. Raises UsageError for an empty
        prompt and for one longer than a slot (`truncate` shortens it), and NoSlotAvailable if all
        slots are in use; nothing is changed then.
        """
        prompt, key = self._checked_prompt(tokens)
        keep = arguments.whole_or_none("keep", keep)
        secret = salt_digest(salt)
        together = self._checked_groups(groups, len(prompt))
        kept = head(self.size, self._kept(prompt, keep), together)
        named = prefix_states.checked_positions(checkpoints, len(prompt))
        with self.context.lock:
            self._check_open()
            self.sync()
            diverging = self._diverging(prompt, key, secret)
            found = self._choose(prompt, secret)
            if found is None:
                self._counts.refused += 1
                raise self._all_in_use()
            slot = self._slots[found.slot]
            wanted = grouping.floor(together, min(found.common, len(prompt) - 1))
            before_last = key[:-TOKEN_BYTES]
            if not wanted and not self.branches.longest_state(before_last, secret, together).end:
                self._check_start(slot)
            if found.evicts:
                self.keep_state(slot)
                self._counts.evict(slot, found.common if found.source is None else 0)
            slot.salt = None  # after an error, the tokens are of no salt
            cached = self._bring(slot, found.source, wanted)
            slot.salt = secret
            cached = self._restore_state(slot, before_last, cached, together)
            if not cached:
                self._make_start(slot)
            self._counts.take(cached, len(prompt))
            slot.groups = together
            points = None
            if self.branches.tier is not None:
                points = self.branches.points(len(prompt), cached, diverging, named, together)
            slot.lease = lease = SlotLease(self, slot, key, cached, kept, points)
        _log.debug(
            "prompt of %d tokens: %d in slot %d%s", len(prompt), cached, found.slot,
            "" if found.source is None else f", from slot {found.source}",
        )  # fmt: skip
        return lease

    @property
    def shares_leased(self) -> bool:
        """Return whether a prompt may get tokens of a slot in use, or a state of its prompt."""
        return self.policy == "best" or self.branches.tier is not None

    def cached_length(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        salt: str | None = None,
    ) -> int:
        """Return how many tokens of a prompt `acquire` finds now, 0 without a free slot.

        Changes nothing. A sliding window may have passed the position since. Raises UsageError as
        `acquire` does.
        """
        prompt, key = self._checked_prompt(tokens)
        secret = salt_digest(salt)
        together = self._checked_groups(groups, len(prompt))
        with self.context.lock:
            self._check_open()
            self.sync()
            found = self._choose(prompt, secret)
            if found is None:
                return 0
            wanted = grouping.floor(together, min(found.common, len(prompt) - 1))
            before_last = key[:-TOKEN_BYTES]
            state = self.branches.longest_state(before_last, secret, together, touch=False)
            return max(wanted, state.end)

    def droppable_sequences(self) -> set[int]:
        """Return the ids of all slots, for `Context.set_adapters`; UsageError if one is in use."""
        if self._closed:
            return set()
        if any(slot.lease for slot in self._slots) or not all(p.closed for p in self._parked):
            msg = "the slot cache has leases, or parked ones: release them first"
            raise UsageError(msg)
        return {slot.sequence.id for slot in self._slots}

    def drop_prefixes(self) -> None:
        """Empty all slots and drop all states, for `Context.set_adapters`."""
        if self._closed:
            return
        for slot in self._slots:
            self._counts.evict(slot)
            self._trim(slot, 0)
        for node in [each for each in self.branches.tree.walk() if each.page is not None]:
            self.branches.drop(node)

    def relieve(self) -> bool:
        """Free cells after a decode found none: see `CacheManager.relieve`.

        Evicts the least recently used history, else copies cells of a sliding window.
        """
        with self.context.lock:
            free = [each for each in self._slots if each.lease is None and each.tokens]
            if not free:
                return defrag_retry.copy_shared_window(
                    self.context, [each.sequence for each in self._slots]
                )
            self._evict(min(free, key=lambda each: each.last_used))
            return True

    def truncate(self, tokens: Iterable[int], keep: int | None = None) -> list[int]:
        """Return a prompt that fits into a slot: its start and its end.

        A prompt with groups is truncated by `truncate`, which returns the new groups.
        """
        prompt: list[int] = as_int32(tokens, "tokens").tolist()
        keep = arguments.whole_or_none("keep", keep)
        return truncate(prompt, self._kept(prompt, keep), self.size)[0]

    def stats(self) -> SlotStats:
        """Return the statistics and totals."""
        states, parked = self.branches.tier, self._parking.size
        return self._counts.stats(self._slots, self.size, states, self.backups, parked)

    def dump(self) -> str:
        """Return the slots as text, one line each."""
        return draw(self._slots, self.size, self.context.model)

    def check(self) -> None:
        """Compare slots and cells. AssertionError names a difference: a defect of this package."""
        with self.context.lock:
            self._check_open()
            check_slots(self._slots, self.size, self.context)

    def close(self) -> None:
        """Remove the slots' sequences from the context, and free all states and parked slots.

        A second call does nothing.
        """
        self._closed = True
        for slot in self._slots:
            slot.sequence.close()
        self.branches.pages.close()
        self._parking.close()

    def __repr__(self) -> str:
        return f"<SlotCache {len(self._slots)} slots of {self.size}, {self.policy}>"

    def resume(self, parked: ParkedSlot, tokens: Iterable[int]) -> SlotLease:
        """Return a lease that continues a parked one, for `ParkedSlot.resume`."""
        arguments.instance("parked", parked, ParkedSlot, "a parked lease of this cache")
        numbers = as_int32(tokens, "tokens")
        given: list[int] = numbers.tolist()
        if parked.cache is not self or parked.closed:
            msg = "this lease is not parked in this cache; acquire its tokens instead"
            raise UsageError(msg)
        have = len(parked.tokens)
        if given[:have] != parked.tokens or len(given) == have:
            msg = "the tokens do not continue the parked ones: give these and at least one more"
            raise UsageError(msg)
        with self.context.lock:
            self._check_open()
            free = [each for each in self._slots if each.lease is None]
            if not free:
                raise self._all_in_use()
            slot = next((each for each in free if parked.unchanged(each)), None)
            if slot is None:
                slot = min(free, key=lambda each: (len(each.tokens) > 0, each.last_used))
                self._unpark(slot, parked)
            elif self.overcommits:
                self.reserve(len(given) - have, slot)
            slot.groups = parked.groups
            cached = len(slot.tokens)
            lease = SlotLease(self, slot, numbers.tobytes(), cached, parked.keep, parked.points)
            slot.lease = lease
            self._counts.resumes += 1
            self._counts.resumed_tokens += cached
            parked.close()
        return lease

    def park(self, slot: Slot, keep: int, points: StatePoints | None) -> ParkedSlot:
        """Save the content of a slot, for `SlotLease.park`."""
        parked = ParkedSlot(self, slot, self._parking, keep, points)
        self._parked.add(parked)
        self._counts.parks += 1
        self._counts.parked_tokens += len(parked.tokens)
        return parked

    def _unpark(self, slot: Slot, parked: ParkedSlot) -> None:
        """Replace the history of a free slot by a parked one, or empty it if there is none."""
        if parked.page is None:
            self._check_start(slot)
        if self.overcommits:
            self.reserve(len(parked.tokens) + 1, None)
        self._evict(slot)
        slot.salt = None  # after an error, the tokens are of no salt
        if parked.page is None:
            self._make_start(slot)
        else:
            try:
                slot.sequence.restore(parked.page.read())
            except StateError as error:
                have = sum(len(each.tokens) for each in self._slots)
                msg = f"a parked sequence of {len(parked.tokens)} tokens is not restored: {error}"
                wanted = len(parked.tokens)
                raise CellUsage(self._cells, have).full(msg, wanted) from error
        slot.salt = parked.salt

    # The interface for leases.

    def sync(self) -> None:
        """Note what a cancelled decode has emptied, also slots outside of its batch.

        The saved state of an unfinished prompt becomes a page. The caller holds the context's lock.
        """
        if self.context.decoder.emptyings != self._emptyings:
            self._emptyings = self.context.decoder.emptyings
            self.branches.record_removed(1)
            self.backups.keep_emptied()

    def restore(self, slot: Slot) -> None:
        """Continue the prompt of an empty slot after its longest saved state, if there is one."""
        lease = slot.lease
        assert lease is not None
        self.sync()
        restored = self._restore_state(slot, lease.key[:-TOKEN_BYTES], 0, slot.groups)
        if lease.backup is not None:
            lease.backup.restart(restored)

    def release_slot(self, slot: Slot) -> None:
        """Release a slot, for `SlotLease.release`."""
        if not (self._closed or self.context.closed):
            self.sync()
        if slot.lease is not None:
            self._counts.evaluated_tokens += slot.lease.evaluated
        slot.lease = None
        self._clock += 1
        slot.last_used = self._clock
        if self._closed or self.context.closed:
            return
        if not slot.sequence.open:
            slot.sequence = self.context.sequence()
        elif slot.sequence.next_pos != len(slot.sequence):
            # Tokens were removed from the middle, so the rest is not a prefix of a prompt.
            self._trim(slot, 0)
        if not slot.tokens:
            # It may not have started because others removed a sequence.
            self.branches.record_removed(1)
        _log.debug("slot of sequence %d keeps %d tokens", slot.sequence.id, len(slot.sequence))

    def discard(self, slot: Slot, keep: int, n: int) -> None:
        """Remove ``n`` tokens after the first ``keep``, and shift the rest down.

        Raises ReprocessNeeded if the memory cannot do that in place; the first ``keep`` tokens
        remain.
        """
        sequence, before = slot.sequence, len(slot.tokens)
        with self.context.lock:
            end = keep + n
            shared = sequence.ledger.shared_with(enumerate(self.context.ledgers), end, None)
            if self.context.info.can_shift and not shared:
                try:
                    sequence.remove(keep, end)
                except PartialRemovalRefused:
                    pass
                else:
                    sequence.shift(end, None, -n)
                    slot.groups = grouping.without(slot.groups, keep, end)
                    self._counts.shifts += 1
                    self._discarded(slot, before)
                    _log.debug("sequence %d: %d tokens shifted out", sequence.id, n)
                    return
            tokens = slot.tokens[:keep] + slot.tokens[end:]
            left = self._restore_state(slot, tokens_to_key(tokens[:keep]), self._trim(slot, keep))
            if not left:
                self._make_start(slot)
            slot.groups = grouping.without(slot.groups, keep, end)
            self._counts.reprocessed += len(tokens) - left
            self._discarded(slot, before)
        msg = (
            f"sequence {sequence.id} is full and cannot be shifted: decode these "
            f"{len(tokens) - left} tokens again"
        )
        raise ReprocessNeeded(msg, tokens[left:])

    def _discarded(self, slot: Slot, before: int) -> None:
        """Count the tokens that a lease decoded and discarded."""
        if slot.lease is not None:
            slot.lease.discarded += before - len(slot.tokens)

    def reserve(self, n: int, slot: Slot | None) -> None:
        """Ensure ``n`` free cells: evict histories of free slots, least recently used first.

        ``slot`` keeps its history.
        """
        ledgers = self.context.ledgers
        # The sum without sharing is cheap, and usually small enough.
        if sum(len(each.tokens) for each in ledgers) + n <= self._cells:
            return
        free = [each for each in self._slots if each.lease is None and each is not slot]
        held = {id(each.sequence.ledger) for each in free}
        least = _cells(each for each in ledgers if id(each) not in held)
        if least + n > self._cells:
            msg = (
                f"no room for {n} tokens: {least} of {self._cells} cells belong to slots in use; "
                "release one, or create the cache with smaller slots"
            )
            raise CellUsage(self._cells, _cells(ledgers)).full(msg, n)
        with self.context.lock:
            for each in sorted(free, key=lambda one: one.last_used):
                if _cells(ledgers) + n <= self._cells:
                    return
                self._evict(each)

    def _evict(self, slot: Slot) -> None:
        """Empty a slot, and keep the state of its history."""
        _log.debug("sequence %d is evicted", slot.sequence.id)
        self.keep_state(slot)
        self._counts.evict(slot)
        self._trim(slot, 0)

    def keep_state(self, slot: Slot) -> None:
        """Save the state of a slot's tokens, if the memory needs states. Never raises for it."""
        sequence, ledger = slot.sequence, slot.sequence.ledger
        if not sequence.open or len(ledger) < max(1, self.branches.schedule.first):
            return
        if slot.salt is None:
            return
        if ledger.moved or ledger.next != len(ledger):
            return
        try:
            self._counts.state_evictions += self.branches.save_prefix(sequence, slot.salt)
        except (NativeError, Unsupported, PagingError, MemoryError) as error:
            if isinstance(error, WorkerDied):
                raise
            _log.warning("the state after %d tokens is not kept: %s", len(ledger), error)

    # Helpers.

    def _checked_prompt(self, tokens: Iterable[int]) -> tuple[list[int], bytes]:
        """Return a prompt as tokens and as a key. Raises UsageError if no slot can hold it."""
        numbers = as_int32(tokens, "tokens")
        if not len(numbers):
            msg = "the prompt is empty"
            raise UsageError(msg)
        if len(numbers) > self.size:
            msg = (
                f"the prompt has {len(numbers)} tokens, a slot holds {self.size}: shorten it "
                "(truncate), or create the cache with larger slots"
            )
            raise UsageError(msg)
        return numbers.tolist(), numbers.tobytes()

    def _checked_groups(self, groups: Iterable[tuple[int, int]], prompt: int) -> tuple[Group, ...]:
        """Return the groups of a prompt, which fit into a batch and into a slot."""
        return grouping.checked(groups, prompt, min(self.context.info.n_batch, self.size - 1))

    def _choose(self, prompt: list[int], salt: bytes) -> slot_choice.SlotChoice | None:
        """Choose the slot for a prompt; None if all are in use."""
        candidates = [self._candidate(each, prompt, salt) for each in self._slots]
        return slot_choice.choose(candidates, self.policy)

    def _leases(self) -> list[SlotLease]:
        """Return the leases that are not released."""
        return [each.lease for each in self._slots if each.lease is not None]

    def _diverging(self, prompt: list[int], key: bytes, salt: bytes) -> set[int]:
        """Return the lengths at which a prompt diverges from others, also from leased ones."""
        if self.branches.tier is None:
            return set()
        own = [slot for slot in self._slots if slot.salt == salt]
        found = {slot_choice.count_common(slot.tokens, prompt) for slot in own}
        return found | self.branches.diverging(key, salt, self._leases())

    def _restore_state(
        self, slot: Slot, key: bytes, have: int, groups: tuple[Group, ...] = ()
    ) -> int:
        """Restore the longest state of a prefix if it has more than ``have`` tokens.

        Returns the number of tokens in the slot, which are unchanged if no cells are free.
        """
        if self.branches.tier is None:
            return have
        assert slot.salt is not None
        node = self.branches.longest_state(key, slot.salt, groups)
        length = node.end
        if length <= have:
            return have
        saved = node.page.read()  # reserving cells may evict the state
        try:
            if self.overcommits:
                self.reserve(length, slot)
            self.branches.record_removed(len(slot.tokens))
            slot.sequence.restore(saved)
        except (KVCacheFull, MemoryError, StateError, Unsupported) as error:
            _log.info("the state of %d tokens is not restored: %s", length, error)
            return len(slot.sequence)
        return length

    def _kept(self, prompt: list[int], keep: int | None) -> int:
        wanted, info = self.keep if keep is None else keep, self.context.model.info
        if wanted < 0:
            return len(prompt)
        return wanted + (info.add_bos and prompt[:1] == [info.token_bos])

    def _candidate(self, slot: Slot, prompt: list[int], salt: bytes) -> slot_choice.Candidate:
        tokens = slot.tokens
        length = len(tokens)
        common = slot_choice.count_common(tokens, prompt) if slot.salt == salt else 0
        if common:
            first_moved = slot.sequence.ledger.first_moved
            if first_moved is not None:
                # Later tokens were evaluated after tokens that a shift has discarded since, so they
                # cannot be reused as a prefix.
                common = min(common, first_moved)
            if not self.branches.returns(length, min(common, len(prompt) - 1)):
                common = 0
        return slot_choice.Candidate(length, common, slot.lease is not None, slot.last_used)

    def _bring(self, slot: Slot, source: int | None, wanted: int) -> int:
        """Truncate or copy the first ``wanted`` tokens into a slot; return their number."""
        if source is None or not wanted:
            return self._trim(slot, wanted)
        self.branches.record_removed(len(slot.tokens))
        try:
            self._slots[source].sequence.copy_to(slot.sequence, wanted)
        except PartialRemovalRefused:
            return self._trim(slot, 0)
        self._counts.forks += 1
        return wanted

    def _trim(self, slot: Slot, length: int) -> int:
        """Keep the first tokens, or none if the memory cannot; return their number."""
        sequence, before = slot.sequence, len(slot.tokens)
        if length >= before:
            return length
        try:
            sequence.trim(length)
        except PartialRemovalRefused:
            sequence.remove()
        self.branches.record_removed(before)
        return len(sequence)

    def _must_clear(self, *, removing: bool = False) -> bool:
        """Return whether this release starts no sequence before a clear."""
        self.sync()
        return self.branches.must_clear(removing=removing)

    def _blocked(self, slot: Slot) -> bool:
        """Return whether a clear would remove sequences in use, other than that of a slot."""
        free = {each.sequence.id for each in self._slots if each.lease is None or each is slot}
        return any(len(own) for i, own in enumerate(self.context.ledgers) if i not in free)

    def _check_start(self, slot: Slot) -> None:
        """Raise NoSlotAvailable if an empty slot could not start in place of this one's history."""
        if self._must_clear(removing=bool(slot.tokens)) and self._blocked(slot):
            self._counts.refused += 1
            msg = (
                "this release starts no recurrent sequence in place of a removed one while others "
                "are in use: release their slots, or use a later release"
            )
            raise NoSlotAvailable(msg, slots=len(self._slots))

    def _make_start(self, slot: Slot) -> None:
        """Let an empty slot start: if necessary and possible, evict free slots and clear."""
        if self._must_clear() and not self._blocked(slot):
            for each in self._slots:
                if each is not slot and each.tokens:
                    self._evict(each)
        self.branches.clear_empty()

    def _all_in_use(self) -> NoSlotAvailable:
        msg = f"all {len(self._slots)} slots are in use: release one, or create more"
        return NoSlotAvailable(msg, slots=len(self._slots))

    def _check_open(self) -> None:
        if self._closed:
            msg = "the slot cache was closed; create a new one"
            raise Closed(msg)


def _cells(ledgers: Iterable[Ledger]) -> int:
    """Return how many cells these ledgers use, shared ones once."""
    return len(set().union(*(each.marks for each in ledgers)))


class Slot:
    """A sequence, whose ledger is the slot's token list, and its state.

    Positions are places in the list: they begin at 0 and have no gap.
    """

    __slots__ = ("groups", "last_used", "lease", "salt", "sequence")

    def __init__(self, sequence: runtime.Sequence) -> None:
        #: The salt of the prompt that the tokens are of; None: unknown, so that none continues it.
        self.salt: bytes | None = NO_SALT
        self.sequence = sequence
        self.lease: SlotLease | None = None
        self.last_used = 0
        self.groups: tuple[Group, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Return the slot's own list of tokens, which the runtime keeps: not to be changed."""
        return self.sequence.ledger.tokens


class SlotLease(SequenceLease):
    """A slot for one prompt, from `SlotCache.acquire`, which a ``with`` block releases.

    ``cached`` is the number of the prompt's tokens that the slot has already, and ``rest`` are the
    tokens to decode. A shift keeps the first ``keep`` tokens.
    """

    def __init__(
        self,
        cache: SlotCache,
        slot: Slot,
        key: bytes,
        cached: int,
        keep: int,
        points: StatePoints | None = None,
    ) -> None:
        self.sequence = slot.sequence
        self.cached = cached
        self.rest = key_to_tokens(key[cached * TOKEN_BYTES :])
        assert slot.salt is not None
        self.key, self.salt = key, slot.salt
        self.points = points
        self.backups = cache.backups
        self.backup = cache.backups.new(key, self.salt, cached)
        #: Tokens to decode again before any others, after a shift that was not possible in place.
        self._to_decode_again: list[int] = []
        self.keep = keep
        #: Tokens that the sequence had, and that `make_room` discarded.
        self.discarded = 0
        self.cache = cache
        self._slot = slot
        self._size = cache.size
        self._overcommits = cache.overcommits
        self.ledger = slot.sequence.ledger
        self.released = False

    @property
    def evaluated(self) -> int:
        """Return how many tokens were decoded with this lease."""
        return max(0, len(self.ledger) + self.discarded - self.cached)

    def make_room(self, n: int = 1) -> None:
        """Free cells for ``n`` more tokens: shift, and evict if slots share all cells.

        Raises KVCacheFull with nothing changed. Raises ReprocessNeeded if the memory cannot shift,
        or if another sequence shares cells that would move: the sequence then has the first tokens,
        and the error the tokens to decode after them, which `decode` does.
        """
        if type(n) is not int or not 0 <= n <= arguments.INT32:
            n = arguments.integer("n", n, 0, arguments.INT32)
        self.checkpoint()
        if self._to_decode_again:
            left = self._to_decode_again[len(self.ledger) :]
            self._to_decode_again = []
            msg = f"the last shift is incomplete: decode these {len(left)} tokens first"
            raise ReprocessNeeded(msg, left)
        if len(self.ledger.tokens) + n > self._size:
            self._shift(n)
        if self._overcommits:
            self.cache.reserve(n, self._slot)

    def decode(self, tokens: int | Iterable[int] | None = None) -> None:
        """Decode tokens (default: the rest of the prompt), with logits of the last one.

        Frees cells first, and decodes tokens again that were lost thereby. Micro-batches split no
        group of the prompt. If one fails, those before it remain, and the next call continues, or
        restarts after the last saved state if the failure emptied the slot. Raises KVCacheFull if
        not even a defragmentation helps.
        """
        given: list[int] = []
        if tokens is not None:
            many = [tokens] if isinstance(tokens, int | np.integer) else tokens
            given = as_int32(many, "tokens").tolist()
        with self.cache.context.lock:
            self._decode(None if tokens is None else given)

    def _decode(self, tokens: list[int] | None) -> None:
        together: tuple[Group, ...] = ()
        self._decode_again()
        given = tokens or []
        if tokens is None:
            if not len(self.ledger) and self.cache.branches.loses_all:
                self.cache.restore(self._slot)
            given = key_to_tokens(self.key[len(self.sequence) * TOKEN_BYTES :])
            together = self._slot.groups
        if not given:
            msg = "no tokens to decode"
            raise UsageError(msg)
        context, start = self.cache.context, len(self.sequence)
        at, end, size = start, start + len(given), context.info.n_ubatch
        cancels, mark = context.cancels, self.ledger.marks[-1:]
        while at < end:
            context.lock.let_readers()
            if context.cancels != cancels:
                msg = f"cancelled with {end - at} tokens left; the others remain"
                raise Cancelled(msg, code=2)
            self.sequence.check_end(mark, f"{end - at} tokens are left")
            upto = grouping.floor(together, at + self.limit_batch(min(size, end - at)))
            if upto <= at:  # a group that is longer than a micro-batch
                upto = grouping.ceil(together, at + 1)
            self._room(upto - at)
            piece = given[at - start : upto - start]
            defrag_retry.decode_feed(
                context,
                self.sequence.feed(piece, "last" if upto == end else "none"),
                self.cache.relieve,
            )
            at = upto
            self.checkpoint()
            mark = self.ledger.marks[-1:]

    def _keep_state(self) -> None:
        self.cache.keep_state(self._slot)

    def park(self) -> ParkedSlot:
        """Release the slot, and save its content for `ParkedSlot.resume`.

        Raises UsageError if it was released.
        """
        if self.released:
            raise UsageError(PARKED_LATE)
        with self.cache.context.lock:
            parked = self.cache.park(self._slot, self.keep, self.points)
            self.release()
        return parked

    def release(self) -> None:
        """Release the slot. Its tokens stay for later prompts. A second call does nothing."""
        try:
            with self.cache.context.lock:
                self._release()
        except Closed:  # a closed context cannot be locked
            self._release()

    def _release(self) -> None:
        if not self.released:
            self.released = True
            self.cache.release_slot(self._slot)

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self.ledger)} of {self._size} tokens"
        return f"<SlotLease of sequence {self.sequence.id}, {state}>"

    def _room(self, n: int) -> None:
        try:
            self.make_room(n)
        except ReprocessNeeded as needed:
            self._to_decode_again = [*self.sequence.tokens, *needed.tokens]
            self._decode_again()

    def _decode_again(self) -> None:
        """Decode tokens again that a shift lost; after a failure, the next call continues."""
        context, again = self.cache.context, self._to_decode_again
        while (have := len(self.sequence)) < len(again):
            piece = again[have : have + context.info.n_ubatch]
            defrag_retry.decode_feed(context, self.sequence.feed(piece, "none"), self.cache.relieve)
        self._to_decode_again = []

    def _shift(self, n: int) -> None:
        slot, keep, have = self._slot, self.keep, len(self.ledger)
        if keep + n > self._size:
            msg = (
                f"no room for {n} tokens in a slot of {self._size} whose first {keep} stay: decode "
                "fewer at once, keep fewer, or create the cache with larger slots"
            )
            raise defrag_retry.CellUsage(self._size, have).full(msg, n)
        discard = shift_discard(self._size, keep, have, slot.groups, wanted=n)
        self.cache.discard(slot, keep, discard)


class ParkedSlot(NotCopied):
    """The content of a slot, saved in host memory. `SlotLease.park` creates it."""

    def __init__(
        self, cache: SlotCache, slot: Slot, tier: MemoryTier, keep: int, points: StatePoints | None
    ) -> None:
        self.cache = cache
        self.tokens = slot.tokens.copy()
        self.groups, self.points = slot.groups, points
        assert slot.lease is not None
        self.salt = slot.lease.salt
        self.keep = keep
        self.closed = False
        self._marks = slot.sequence.ledger.marks.copy()
        #: The saved sequence; None if it cannot be saved, so that its tokens are decoded again.
        self.page: Page | None = None
        try:
            if self.tokens:
                saved = slot.sequence.save(portable=False)
                self.page = tier.write(saved, 0, len(self.tokens))
        except (NativeError, Unsupported, MemoryError) as error:
            if isinstance(error, WorkerDied):
                raise
            _log.warning("a parked sequence will be decoded again: %s", error)

    def unchanged(self, slot: Slot) -> bool:
        """Return whether a slot still has the parked cells."""
        if slot.salt != self.salt:
            return False
        return bool(self.tokens) and slot.sequence.ledger.marks == self._marks

    def resume(self, tokens: Iterable[int]) -> SlotLease:
        """Return a lease for the parked tokens and at least one more: see `Parked.resume`."""
        return self.cache.resume(self, tokens)

    def close(self) -> None:
        """Free the saved content. A second call does nothing."""
        if self.page is not None and not self.closed:
            self.page.drop()
        self.closed = True


#: Number of tokens at the start and end of a slot that `draw` shows.
SHOWN = 24


@dataclass(frozen=True, slots=True)
class SlotStats:
    """The numbers of a slot cache.

    Of ``prompts`` with ``prompt_tokens``, ``reused_tokens`` were there already; ``hits`` had any.
    ``forks`` copied a prefix, ``evictions`` dropped a history, ``refused`` prompts found all slots
    in use. ``shifts`` were done in place, ``reprocessed`` tokens were decoded again.
    ``evaluated_tokens`` of prompts and text were decoded, ``evicted_tokens`` were dropped.
    Leases were parked ``parks`` times. There are ``states`` saved states. ``hits_by_depth`` counts
    prompts by the number of their cached tokens (see `DepthCounts`); ``bytes_by_tier`` are the
    bytes of states, also those of unfinished prompts, and of parked slots in host memory.
    """

    slots: int
    in_use: int
    size: int
    tokens: int
    prompts: int
    hits: int
    misses: int
    prompt_tokens: int
    reused_tokens: int
    forks: int
    evictions: int
    shifts: int
    reprocessed: int
    refused: int
    evaluated_tokens: int
    evicted_tokens: int
    parks: int
    resumes: int
    parked_tokens: int
    resumed_tokens: int
    states: int
    state_evictions: int
    hits_by_depth: dict[str, int]
    bytes_by_tier: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class SlotCounts:
    """The totals of a slot cache."""

    def __init__(self) -> None:
        self.prompts = self.hits = self.prompt_tokens = self.reused_tokens = 0
        self.forks = self.evictions = self.shifts = self.reprocessed = self.refused = 0
        self.evaluated_tokens = self.evicted_tokens = 0
        self.parks = self.resumes = self.parked_tokens = self.resumed_tokens = 0
        self.state_evictions = 0
        self.depths = DepthCounts()

    def evict(self, slot: Slot, keep: int = 0) -> None:
        """Count a history of which the first ``keep`` tokens remain."""
        self.evictions += len(slot.tokens) > 0
        self.evicted_tokens += max(0, len(slot.tokens) - keep)

    def take(self, cached: int, length: int) -> None:
        """Count a prompt that got a slot."""
        self.prompts += 1
        self.hits += cached > 0
        self.depths.add(cached)
        self.reused_tokens += cached
        self.prompt_tokens += length

    def stats(
        self,
        slots: Sequence[Slot],
        size: int,
        states: PageTier | None,
        backups: PrefillBackups,
        parked: int,
    ) -> SlotStats:
        """Return the numbers, with those of the slots, and the bytes of states and parked slots."""
        counts = dict(vars(self))
        depths = counts.pop("depths")
        leases = (each.lease for each in slots)
        kept = backups.size + (states.size if states is not None else 0)
        counts["state_evictions"] += backups.evicted
        counts["evaluated_tokens"] += sum(each.evaluated for each in leases if each is not None)
        return SlotStats(
            slots=len(slots),
            in_use=sum(each.lease is not None for each in slots),
            size=size,
            tokens=sum(len(each.tokens) for each in slots),
            misses=self.prompts - self.hits,
            states=states.count if states is not None else 0,
            hits_by_depth=dict(depths),
            bytes_by_tier={"states": kept, "parked": parked},
            **counts,
        )


def draw(slots: Sequence[Slot], size: int, model: Model) -> str:
    """Return a line per slot: its state, how full it is, and how it begins and ends."""
    order = {id(each): n for n, each in enumerate(sorted(slots, key=lambda one: one.last_used))}
    lines = []
    for number, each in enumerate(slots):
        state = "in use" if each.lease is not None else "free" if each.tokens else "empty"
        first_moved = each.sequence.ledger.first_moved
        shifted = "" if first_moved is None else f", shifted from {first_moved} on"
        lines.append(
            f"slot {number}: sequence {each.sequence.id}, {state}, {len(each.tokens)} of {size} "
            f"tokens{shifted}, age {len(slots) - order[id(each)]}: {_shown(each.tokens, model)}"
        )
    return "\n".join(lines)


def _shown(tokens: list[int], model: Model) -> str:
    if not model.info.has_vocab:
        head = " ".join(map(str, tokens[:8]))
        return head + (" ..." if len(tokens) > 8 else "")
    if len(tokens) <= 2 * SHOWN:
        return repr(model.detokenize(tokens))
    return f"{model.detokenize(tokens[:SHOWN])!r} ... {model.detokenize(tokens[-SHOWN:])!r}"


def check_slots(slots: Sequence[Slot], size: int, context: Context) -> None:
    """Raise AssertionError unless slots, ledgers and cells agree.

    The caller holds the context's lock.
    """
    ids = [each.sequence.id for each in slots]
    agree(len(set(ids)) == len(ids), f"two slots have one sequence: {ids}")
    for slot in slots:
        name, tokens = f"sequence {slot.sequence.id}", slot.tokens
        agree(slot.sequence.open, f"{name} was closed")
        agree(len(tokens) <= size, f"{name} has {len(tokens)} tokens in a slot of {size}")
        places = list(range(len(tokens)))
        agree(slot.sequence.positions == places, f"{name} has gaps between its positions")
        last = slot.sequence.pos_max
        agree(last == len(tokens) - 1, f"{name} ends at {last} and has {len(tokens)} tokens")
    check_ledgers(context)


def shift_discard(
    size: int, keep: int, length: int, groups: Sequence[Group] = (), *, wanted: int = 0
) -> int:
    """Return the number of tokens after the first ``keep`` to discard, of ``length`` in ``size``.

    This frees half of ``size - keep``, and at least ``wanted``. A group at the end of the discarded
    range is discarded completely.
    """
    target = max((size - keep) // 2, 1, wanted)
    discard = min(max(target - (size - length), 0), max(length - keep, 0))
    return grouping.ceil(groups, keep + discard) - keep if discard else 0


def head(size: int, keep: int, groups: Sequence[Group] = ()) -> int:
    """Return how many tokens stay: ``keep``, fewer than ``size``, and no part of a group."""
    limited = min(max(keep, 0), size - 1)
    whole = grouping.ceil(groups, limited)
    return whole if whole < size else grouping.floor(groups, limited)


def truncate(
    tokens: Iterable[int], keep: int, size: int, groups: Iterable[tuple[int, int]] = ()
) -> tuple[list[int], tuple[Group, ...]]:
    """Return a prompt truncated to ``size`` after its first ``keep`` tokens, and its groups.

    Raises UsageError if the unsplittable parts are too large.
    """
    given = list(tokens)
    whole = grouping.checked(groups, len(given), len(given))
    over = len(given) - size
    if over <= 0:
        return given, whole
    first = head(size, keep, whole)
    end = grouping.ceil(whole, first + over)
    if end >= len(given):
        msg = (
            f"a prompt of {len(given)} tokens cannot be cut to {size} with its first {first} kept: "
            "the group at its end would be removed; keep fewer, or make the group smaller"
        )
        raise UsageError(msg)
    return given[:first] + given[end:], grouping.without(whole, first, end)
