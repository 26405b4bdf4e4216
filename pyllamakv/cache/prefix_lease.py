"""Hold a sequence of a prefix cache for one prompt, and give it back with what was decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.cache import eviction, room
from pyllamakv.cache.prefix_tree import WIDTH, pack, unpack

if TYPE_CHECKING:
    from types import TracebackType

    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.runtime.sequence import Sequence

#: Room is asked for so many tokens at a time where it costs nobody anything.
AHEAD = 64

#: States of memories that cannot go back are kept so many tokens apart.
STATE_EVERY = 2048


class PrefixLease:
    """Hold the sequence; `PrefixCache.acquire` makes it. Leaving it as a context releases it."""

    def __init__(
        self, cache: PrefixCache, sequence: Sequence, key: bytes, cached: int, known: int
    ) -> None:
        self.cache = cache
        self.sequence = sequence
        self.cached = cached
        self.rest = unpack(key[cached * WIDTH :])
        self._key = key
        #: How long the sequence may become before room has to be made again, and how long it was
        #: asked for to become; what is between them was granted ahead and may be taken back.
        self.granted = self.asked = self._prompt = len(key) // WIDTH
        #: How much of the prompt the tree has, where a state may be missing.
        self._known = known
        self.ledger = sequence.ledger
        self._seen: tuple[int, ...] = ()
        self._whole = True
        branches = cache.branches
        self.node = branches.tree.insert(key[: cached * WIDTH])
        branches.lease(self.node, self)
        branches.tree.touch(self.node)
        branches.tidy(self.node)
        cache.leases.append(self)

    @property
    def released(self) -> bool:
        """Tell whether this was released."""
        return self not in self.cache.leases

    @property
    def promised(self) -> int:
        """Return how many tokens may still be decoded without asking for room."""
        return max(0, self.granted - len(self.ledger))

    def prefill(self, *, logits: bool = True) -> None:
        """Decode the rest of the prompt in pieces of n_batch; what was decoded stays if one fails.

        Called again it goes on from there, from the beginning where a failure emptied the sequence.
        Where a memory cannot go back, states are kept on the way: where other prompts part from
        this one, before its last token, and every `STATE_EVERY` tokens.
        """
        logits = arguments.flag("logits", logits)
        prompt = self._prompt
        for stop in [*self._stops(prompt), prompt]:
            here = len(self.ledger)
            if here < stop:
                tokens = unpack(self._key[here * WIDTH : stop * WIDTH])
                self._decode(tokens, logits=logits and stop == prompt)
            if stop < prompt:
                self.cache.sync()
                eviction.keep_state(self.cache, self)

    def _decode(self, tokens: list[int], *, logits: bool) -> None:
        """Decode tokens; other leases may have taken the hole that was there for them."""
        context, sequence, start = self.cache.context, self.sequence, len(self.ledger)

        def go_on() -> None:
            context.prefill(sequence, tokens[len(self.ledger) - start :], logits=logits)

        room.decode(context, go_on, {sequence.id: len(tokens)})

    def _stops(self, prompt: int) -> list[int]:
        if self.cache.branches.partial:
            return []
        places = {self._known, prompt - 1, *range(STATE_EVERY, prompt - 1, STATE_EVERY)}
        return sorted(each for each in places if self.cached < each < prompt)

    def make_room(self, n: int) -> None:
        """Make room for ``n`` more tokens; others are paged out or dropped for it.

        Raises KVCacheFull when it cannot, with nothing changed.
        """
        if type(n) is not int or not 0 <= n <= arguments.INT32:
            n = arguments.whole("n", n, 0, arguments.INT32)
        self.asked = asked = len(self.ledger.tokens) + n
        if asked > self.granted:
            self._grow(n)

    def yield_room(self) -> None:
        """Give up what was granted ahead, because others need it."""
        self.granted = min(self.granted, max(self._prompt, self.asked))

    def _grow(self, n: int) -> None:
        cache = self.cache
        cache.sync()
        here = len(self.ledger)
        ahead = n + AHEAD
        longest = cache.size_limit
        near = longest is not None and here + ahead > longest
        roomy = not near and (
            eviction.plenty(cache, ahead, self) or eviction.shortage(cache, ahead, self) <= 0
        )
        wanted = ahead if roomy else n
        eviction.make_cells(cache, wanted, self)
        self.granted = max(self.granted, here + wanted)
        cache.enforce(n)

    def follow(self) -> None:
        """Move to the node where the tokens of the sequence end now."""
        ledger, branches = self.ledger, self.cache.branches
        count = len(ledger) if self.sequence.open else 0
        seen = (count, ledger.next, ledger.marks[-1] if count else -1, ledger.moved)
        if seen == self._seen:
            return
        self._seen = seen
        # Tokens that were shifted, or have a gap, are no beginning of any prompt.
        self._whole = self.sequence.open and ledger.next == count and not ledger.moved
        before = self.node
        self.node = branches.tree.insert(pack(ledger.tokens) if self._whole and count else b"")
        if self.node is not before:
            branches.lease(self.node, self)
            branches.unlease(before, self)
            branches.tidy(before)
        branches.tidy(self.node)

    def release(self) -> None:
        """Give the sequence back; what it holds stays for later prompts. Twice does nothing."""
        cache = self.cache
        if cache.closed or cache.context.closed or self.released:
            return
        self.follow()
        branches, node = cache.branches, self.node
        cache.leases.remove(self)
        branches.unlease(node, self)
        # Others may have decoded the same; what is longer holds this as well.
        known = node.held if branches.partial else node.entry is not None
        if node.parent is None or not self._whole or known:
            branches.close(self.sequence)
        else:
            branches.keep(node, self.sequence)
        branches.tree.touch(node)
        branches.tidy(node)
        cache.enforce(0)

    def __enter__(self) -> PrefixLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"sequence {self.sequence.id}"
        return f"<PrefixLease {state}, {self.cached} cached, {len(self.rest)} to decode>"
