"""Hold a sequence of a prefix cache for one prompt, and give it back with what was decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.cache import prefix_room
from pyllamakv.cache.tree import WIDTH, pack, unpack

if TYPE_CHECKING:
    from types import TracebackType

    from pyllamakv.cache.prefix import PrefixCache
    from pyllamakv.runtime.sequence import Sequence

#: Room is asked for so many tokens at a time where it costs nobody anything.
AHEAD = 64


class PrefixLease:
    """Hold the sequence; `PrefixCache.acquire` makes it. Leaving it as a context releases it."""

    def __init__(self, cache: PrefixCache, sequence: Sequence, key: bytes, cached: int) -> None:
        self.cache = cache
        self.sequence = sequence
        self.cached = cached
        self.rest = unpack(key[cached * WIDTH :])
        #: How long the sequence may become before room has to be made again.
        self.granted = len(key) // WIDTH
        self._ledger = sequence.ledger
        self._seen = (-1, -1)
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
        return max(0, self.granted - len(self._ledger))

    def make_room(self, n: int) -> None:
        """Make room for ``n`` more tokens; others are paged out or dropped for it.

        Raises KVCacheFull when it cannot, with nothing changed.
        """
        if len(self._ledger.tokens) + n > self.granted:
            self._grow(n)

    def _grow(self, n: int) -> None:
        cache = self.cache
        cache.sync()
        here = len(self._ledger)
        ahead = n + AHEAD
        longest = prefix_room.capacity(cache.context)
        near = longest is not None and here + ahead > longest
        wanted = n if near or prefix_room.shortage(cache, ahead, self) > 0 else ahead
        prefix_room.make_cells(cache, wanted, self)
        self.granted = max(self.granted, here + wanted)
        cache.enforce(n)

    def follow(self) -> None:
        """Move to the node where the tokens of the sequence end now."""
        ledger, branches = self._ledger, self.cache.branches
        count = len(ledger) if self.sequence.open else 0
        seen = (count, ledger.marks[-1] if count else -1)
        if seen == self._seen:
            return
        self._seen = seen
        # Tokens that were shifted are no beginning of any prompt.
        self._whole = self.sequence.open and (not count or ledger.positions[-1] == count - 1)
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
        if cache.closed or self.released:
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
