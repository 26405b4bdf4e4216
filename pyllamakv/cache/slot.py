"""Hold one slot of a cache, and the lease on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.cache import groups as grouping
from pyllamakv.cache import room
from pyllamakv.cache.shifting import shift_discard
from pyllamakv.errors import PartialRemovalRefused, ReprocessNeeded, UsageError
from pyllamakv.runtime.batch import as_int32

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pyllamakv.cache.groups import Group
    from pyllamakv.cache.slot_cache import SlotCache
    from pyllamakv.runtime.sequence import Sequence


class Slot:
    """Hold a sequence, whose ledger is the slot's token list, and what is known of it.

    Positions are places in the list: they begin at 0 and have no gap.
    """

    __slots__ = ("groups", "last_used", "lease", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.lease: SlotLease | None = None
        self.last_used = 0
        self.groups: tuple[Group, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Return the slot's own list of tokens, which the runtime keeps: not to be changed."""
        return self.sequence.ledger.tokens

    def trim(self, length: int) -> int:
        """Keep the first tokens, or none where the memory keeps no part; return how many."""
        if length < len(self.sequence):
            try:
                self.sequence.trim(length)
            except PartialRemovalRefused:
                self.sequence.remove()
                length = 0
        return length


class SlotLease:
    """Hold a slot for one prompt. `SlotCache.acquire` makes it; leaving it releases.

    ``cached`` of the prompt's tokens are there already, ``rest`` are to be decoded. The first
    ``keep`` tokens survive a shift.
    """

    def __init__(
        self, cache: SlotCache, slot: Slot, prompt: list[int], cached: int, keep: int
    ) -> None:
        self.sequence = slot.sequence
        self.cached = cached
        self.rest = prompt[cached:]
        self._prompt = prompt
        #: What the sequence is to have again before anything else is decoded, after a shift that
        #: was not done in place.
        self._owed: list[int] = []
        self.keep = keep
        self._cache = cache
        self._slot = slot
        self._size = cache.size
        self._lends = cache.lends
        self._tokens = slot.sequence.ledger
        self.released = False

    def make_room(self, n: int = 1) -> None:
        """Make room for ``n`` more tokens: shift, and evict where slots share all cells.

        Raises KVCacheFull with nothing changed when it cannot. Raises ReprocessNeeded where the
        memory cannot shift, or another sequence shares what would move: the sequence then has the
        head that stays, and the error the tokens to decode after it; `decode` does that.
        """
        if type(n) is not int or not 0 <= n <= arguments.INT32:
            n = arguments.whole("n", n, 0, arguments.INT32)
        if self._owed:
            left = self._owed[len(self._tokens) :]
            self._owed = []
            msg = f"the last shift was not finished: decode these {len(left)} tokens first"
            raise ReprocessNeeded(msg, left)
        if len(self._tokens.tokens) + n > self._size:
            self._shift(n)
        if self._lends:
            self._cache.reserve(n, self._slot)

    def decode(self, tokens: int | Iterable[int] | None = None) -> None:
        """Decode tokens, what is left of the prompt by default, with logits of the last.

        Makes room first, and decodes again what that could not keep. In pieces of n_batch that
        split no group of the prompt; when one fails those before it stay, and the next call goes on
        from there. Raises KVCacheFull where not even a defragmentation makes room.
        """
        given: list[int] = []
        together: tuple[Group, ...] = ()
        if tokens is not None:
            many = [tokens] if isinstance(tokens, int | np.integer) else tokens
            given = as_int32(many, "tokens").tolist()
        self._repay()
        if tokens is None:
            given = self._prompt[len(self.sequence) :]
            together = self._slot.groups
        if not given:
            msg = "there is nothing to decode: no tokens"
            raise UsageError(msg)
        context, start = self._cache.context, len(self.sequence)
        at, end, size = start, start + len(given), context.info.n_batch
        while at < end:
            upto = grouping.floor(together, min(at + size, end))
            self._room(upto - at)
            piece = given[at - start : upto - start]
            room.decode_feed(context, self.sequence.feed(piece, "last" if upto == end else "none"))
            at = upto

    def release(self) -> None:
        """Give the slot back; what it holds stays for later prompts. Twice does nothing."""
        if not self.released:
            self.released = True
            self._cache.give_back(self._slot)

    def __enter__(self) -> SlotLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self._tokens)} of {self._size} tokens"
        return f"<SlotLease of sequence {self.sequence.id}, {state}>"

    def _room(self, n: int) -> None:
        try:
            self.make_room(n)
        except ReprocessNeeded as needed:
            self._owed = [*self.sequence.tokens, *needed.tokens]
            self._repay()

    def _repay(self) -> None:
        """Decode again what a shift could not keep; when a piece fails the next call goes on."""
        context, owed = self._cache.context, self._owed
        while (have := len(self.sequence)) < len(owed):
            piece = owed[have : have + context.info.n_batch]
            room.decode_feed(context, self.sequence.feed(piece, "none"))
        self._owed = []

    def _shift(self, n: int) -> None:
        slot, keep, have = self._slot, self.keep, len(self._tokens)
        if keep + n > self._size:
            msg = (
                f"no room for {n} tokens in a slot of {self._size} whose first {keep} stay: decode "
                "fewer at once, keep fewer, or make the cache with larger slots"
            )
            raise room.Room(self._size, have).full(msg, n)
        discard = shift_discard(self._size, keep, have, slot.groups, wanted=n)
        self._cache.discard(slot, keep, discard)
