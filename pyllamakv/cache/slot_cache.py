"""Keep several conversations in one context: a slot each, and what they have in common once.

A slot is a sequence, and its token list is the sequence's ledger, which changes only after the
library has agreed. So a decode that fails, or is cancelled, leaves no token in a slot that the
cache has not, and none in the cache that no slot has.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.cache import groups as grouping
from pyllamakv.cache import shifting
from pyllamakv.cache import slot_choice as choosing
from pyllamakv.cache.room import Room
from pyllamakv.cache.slot import Slot, SlotLease
from pyllamakv.cache.slot_stats import Counts, SlotStats, draw, examine
from pyllamakv.errors import (
    Closed,
    NoSlotAvailable,
    PartialRemovalRefused,
    ReprocessNeeded,
    UsageError,
)
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.context import Context

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pyllamakv.cache.slot_choice import Policy
    from pyllamakv.runtime.ledger import Ledger

_log = logging.getLogger("pyllamakv.cache")


class SlotCache:
    """Own the cache of a context as slots.

    ``n_slots`` slots (None: as many as the context has sequences) of ``size`` tokens each (None:
    the cells divided by the slots; more means that they lend each other cells, and that the
    history that was used longest ago makes way). ``policy`` chooses a slot: see `choice.choose`.
    ``keep`` is how many tokens at the beginning of a prompt a shift leaves: negative means all of
    it, and the model's first token is never counted.
    """

    def __init__(
        self,
        context: Context,
        n_slots: int | None = None,
        policy: Policy = "best",
        keep: int = 0,
        *,
        size: int | None = None,
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
        self.policy = choosing.checked(policy)
        self.keep = arguments.whole("keep", keep)
        cells = context.info.n_ctx // context.partitions
        self.size = (cells if context.partitions > 1 else cells // n) if size is None else size
        if not 2 <= self.size <= cells:
            msg = (
                f"a slot must have from 2 to {cells} tokens here, not {arguments.shown(self.size)}"
            )
            raise UsageError(msg)
        self._cells = cells
        self._counts = Counts()
        self._clock = 0
        self._closed = False
        self._slots: list[Slot] = []
        try:
            while len(self._slots) < n:
                self._slots.append(Slot(context.sequence()))
        except BaseException:
            self.close()
            raise
        #: Whether a slot may find that others have the cells that it needs.
        self.lends = context.partitions == 1 and (
            n * self.size > cells or n < context.info.n_seq_max
        )

    def acquire(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        keep: int | None = None,
    ) -> SlotLease:
        """Return a lease on a slot for a prompt, with as much of it as any slot has.

        At least one token is left to evaluate. ``keep`` is as in the class. Raises UsageError for
        an empty prompt and for one longer than a slot (`truncate` shortens it), NoSlotAvailable
        when all slots are in use; nothing was changed then.
        """
        prompt: list[int] = as_int32(tokens, "tokens").tolist()
        keep = arguments.whole_or_none("keep", keep)
        if not prompt:
            msg = "the prompt is empty: there is nothing to evaluate"
            raise UsageError(msg)
        if len(prompt) > self.size:
            msg = (
                f"the prompt has {len(prompt)} tokens and a slot {self.size}: shorten it "
                "(truncate does, on request), or make the cache with larger slots"
            )
            raise UsageError(msg)
        largest = min(self.context.info.n_batch, self.size - 1)
        together = grouping.checked(groups, len(prompt), largest)
        kept = shifting.head(self.size, self._kept(prompt, keep), together)
        with self.context.turn:
            self._check_open()
            found = choosing.choose([self._candidate(each, prompt) for each in self._slots],
                                    self.policy)  # fmt: skip
            if found is None:
                self._counts.refused += 1
                msg = f"all {len(self._slots)} slots are in use: release one, or make more"
                raise NoSlotAvailable(msg, slots=len(self._slots))
            slot = self._slots[found.slot]
            wanted = grouping.floor(together, min(found.common, len(prompt) - 1))
            cached = self._bring(slot, found.source, wanted)
            self._counts.take(found.evicts, cached, len(prompt))
            slot.groups = together
            slot.lease = lease = SlotLease(self, slot, prompt, cached, kept)
        _log.debug(
            "prompt of %d tokens: %d in slot %d%s", len(prompt), cached, found.slot,
            "" if found.source is None else f", from slot {found.source}",
        )  # fmt: skip
        return lease

    def truncate(self, tokens: Iterable[int], keep: int | None = None) -> list[int]:
        """Return a prompt that fits into a slot: its head, and the end of it.

        A prompt with groups is cut by `shifting.truncate`, which says where they are then.
        """
        prompt: list[int] = as_int32(tokens, "tokens").tolist()
        keep = arguments.whole_or_none("keep", keep)
        return shifting.truncate(prompt, self._kept(prompt, keep), self.size)[0]

    def stats(self) -> SlotStats:
        """Count slots, tokens, and what happened so far."""
        return self._counts.stats(self._slots, self.size)

    def dump(self) -> str:
        """Draw the slots as text, a line each."""
        return draw(self._slots, self.size, self.context.model)

    def check(self) -> None:
        """Compare slots and cells; AssertionError names what does not hold: our own fault."""
        with self.context.turn:
            self._check_open()
            examine(self._slots, self.size, self.context)

    def close(self) -> None:
        """Remove the slots' sequences from the context; a second call does nothing."""
        self._closed = True
        for slot in self._slots:
            slot.sequence.close()

    def __enter__(self) -> SlotCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SlotCache {len(self._slots)} slots of {self.size}, {self.policy}>"

    # What leases ask for...

    def give_back(self, slot: Slot) -> None:
        """Take a slot back; `SlotLease.release` calls this."""
        slot.lease = None
        self._clock += 1
        slot.last_used = self._clock
        if self._closed or self.context.closed:
            return
        if not slot.sequence.open:
            slot.sequence = self.context.sequence()
        elif slot.sequence.next_pos != len(slot.sequence):
            # Its holder took tokens out of the middle: no prompt begins with what is left.
            slot.sequence.remove()
        _log.debug("slot of sequence %d keeps %d tokens", slot.sequence.id, len(slot.sequence))

    def discard(self, slot: Slot, keep: int, n: int) -> None:
        """Take ``n`` tokens out behind the first ``keep``, and close the gap.

        Raises ReprocessNeeded where that cannot be done in place; then the head is left.
        """
        sequence = slot.sequence
        with self.context.turn:
            end = keep + n
            if self._can_shift(slot, end):
                try:
                    sequence.remove(keep, end)
                except PartialRemovalRefused:
                    pass
                else:
                    sequence.shift(end, None, -n)
                    slot.groups = grouping.without(slot.groups, keep, end)
                    self._counts.shifts += 1
                    _log.debug("sequence %d: %d tokens shifted out", sequence.id, n)
                    return
            tokens = slot.tokens[:keep] + slot.tokens[end:]
            left = slot.trim(keep)
            if not left:
                self._begin_again()
            slot.groups = grouping.without(slot.groups, keep, end)
            self._counts.reprocessed += len(tokens) - left
        msg = (
            f"sequence {sequence.id} is full and cannot be shifted in place: decode these "
            f"{len(tokens) - left} tokens again"
        )
        raise ReprocessNeeded(msg, tokens[left:])

    def reserve(self, n: int, slot: Slot) -> None:
        """Make sure of ``n`` free cells: histories of free slots make way, the oldest first."""
        ledgers = self.context.ledgers
        # What all of them had without sharing is quick to add up, and mostly enough.
        if sum(len(each.tokens) for each in ledgers) + n <= self._cells:
            return
        free = [each for each in self._slots if each.lease is None and each is not slot]
        held = {id(each.sequence.ledger) for each in free}
        least = _cells(each for each in ledgers if id(each) not in held)
        if least + n > self._cells:
            msg = (
                f"no room for {n} tokens: {least} of {self._cells} cells belong to slots in use; "
                "release one, or make the cache with smaller slots"
            )
            raise Room(self._cells, _cells(ledgers)).full(msg, n)
        with self.context.turn:
            for each in sorted(free, key=lambda one: one.last_used):
                if _cells(ledgers) + n <= self._cells:
                    return
                _log.debug("sequence %d makes way", each.sequence.id)
                self._counts.evictions += len(each.sequence) > 0
                each.trim(0)

    # Underneath...

    def _kept(self, prompt: list[int], keep: int | None) -> int:
        wanted, info = self.keep if keep is None else keep, self.context.model.info
        if wanted < 0:
            return len(prompt)
        return wanted + (info.add_bos and prompt[:1] == [info.token_bos])

    def _candidate(self, slot: Slot, prompt: list[int]) -> choosing.Candidate:
        common, length = choosing.count_common(slot.tokens, prompt), len(slot.tokens)
        exact = slot.sequence.ledger.exact
        if exact is not None:
            # What follows was evaluated behind tokens that a shift has discarded since: it is no
            # prefix of a prompt that says the same.
            common = min(common, exact)
        if self.context.info.can_remove_partly is False and not common == length < len(prompt):
            common = 0
        return choosing.Candidate(length, common, slot.lease is not None, slot.last_used)

    def _bring(self, slot: Slot, source: int | None, wanted: int) -> int:
        """Give a slot the first ``wanted`` tokens of itself or another; return how many it has."""
        if source is None or not wanted:
            left = slot.trim(wanted)
            if not left:
                self._begin_again()
            return left
        other = self._slots[source].sequence
        slot.sequence.close()
        try:
            slot.sequence = other.fork(None if wanted == len(other) else wanted)
        except PartialRemovalRefused:
            wanted = 0
        finally:
            if not slot.sequence.open:
                slot.sequence = self.context.sequence()
        self._counts.forks += wanted > 0
        return wanted

    def _can_shift(self, slot: Slot, end: int) -> bool:
        if not self.context.info.can_shift or self.context.info.can_remove_partly is False:
            return False
        return not slot.sequence.ledger.shared_with(enumerate(self.context.ledgers), end, None)

    def _begin_again(self) -> None:
        """Clear an empty context of states: some releases begin none beside a removed one."""
        context = self.context
        if context.info.memory.keeps_states and not any(len(each) for each in context.ledgers):
            context.clear()

    def _check_open(self) -> None:
        if self._closed:
            msg = "the slot cache was closed; make another"
            raise Closed(msg)


def _cells(ledgers: Iterable[Ledger]) -> int:
    """Return how many cells these ledgers use, shared ones once."""
    return len(set().union(*(each.marks for each in ledgers)))
