"""Keep what was decoded for the prompts to come, and begin each prompt where it is known to.

One cache for one or many conversations: `PrefixCache` holds a tree of token runs over sequences
of a context. A prompt gets a sequence with the longest beginning that any of them has.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.cache import branch_pages, eviction, prefix_checking, prefix_match
from pyllamakv.cache import groups as grouping
from pyllamakv.cache.branches import Branches
from pyllamakv.cache.paging import pager
from pyllamakv.cache.prefix_lease import PrefixLease
from pyllamakv.cache.prefix_stats import COUNTED, PrefixStats, draw, measure
from pyllamakv.cache.prefix_tree import WIDTH
from pyllamakv.errors import (
    BudgetTooSmall,
    Closed,
    PagingError,
    UsageError,
)
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.decoding import outside

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike
    from types import TracebackType

    from pyllamakv.cache.prefix_tree import Node

LOG = logging.getLogger("pyllamakv.cache")


class PrefixCache:
    """Own the sequences of a context as branches of a prefix tree; one thread at a time.

    ``entries`` is how many sequences it may use (None: all; 1: a single entry, which each prompt
    cuts and takes over). ``budget`` are the bytes that resident and paged branches may take
    together. ``paging`` is where branches go that find no room, "memory" or a folder; None drops
    them.
    """

    def __init__(
        self,
        context: Context,
        *,
        entries: int | None = None,
        budget: int | None = None,
        paging: str | PathLike[str] | None = None,
    ) -> None:
        arguments.instance("context", context, Context, "a Context")
        entries = arguments.whole_or_none("entries", entries)
        budget = arguments.whole_or_none("budget", budget, 0)
        most = context.info.n_seq_max
        if entries is not None and not 1 <= entries <= most:
            msg = f"entries must be 1 to {most} (n_seq_max), not {arguments.shown(entries)}"
            raise UsageError(msg)
        self.context = context
        self.branches = Branches(context, entries or most, pager(paging))
        self.budget = budget
        #: How many tokens a sequence may have, None where there is no limit.
        self.size_limit = eviction.capacity(context)
        self.pins: dict[str, Node] = {}
        self._emptied = context.emptied
        self.leases: list[PrefixLease] = []
        self.closed = False
        self.counts = dict.fromkeys(COUNTED, 0)
        self.check_budget(1)

    # Prompts...

    def acquire(
        self, tokens: Iterable[int], *, groups: Iterable[tuple[int, int]] = ()
    ) -> PrefixLease:
        """Return a lease for a prompt, with the longest beginning of it that is known.

        At least one token is left to decode. A beginning never ends inside one of ``groups``,
        ranges of the prompt that do not overlap. Raises UsageError, BudgetTooSmall,
        NoSlotAvailable, KVCacheFull, or PagingError when a branch in the way cannot be written;
        the cache has what it had then.
        """
        key = self.key(tokens)
        prompt = len(key) // WIDTH
        together = grouping.checked(groups, prompt, prompt)
        self.check_budget(prompt)
        self.sync()
        known = self.branches.tree.match(key)[1]
        try:
            sequence, length = prefix_match.begin(self, key, together)
        finally:
            self.forget_pins()
        lease = PrefixLease(self, sequence, key, length, known)
        try:
            eviction.make_cells(self, prompt - length, lease)
        except BaseException:
            lease.release()
            raise
        self.enforce(prompt - length)
        self._count(prompt, length)
        return lease

    def _count(self, prompt: int, length: int) -> None:
        counts = self.counts
        counts["hits" if length else "misses"] += 1
        counts["reused"] += length
        counts["asked"] += prompt
        if LOG.isEnabledFor(logging.INFO):
            stats = self.stats()
            LOG.info(
                "%s: %d of %d tokens cached, %d to decode; %d branches, %d paged out, %d cells, "
                "%d bytes",
                *("hit" if length else "miss", length, prompt, prompt - length),
                *(stats.resident, stats.paged, stats.cells, stats.bytes),
            )

    def sync(self) -> None:
        """Take note of what was decoded under the leases since the last call."""
        self._check_open()
        for lease in self.leases:
            lease.follow()
        if self.context.emptied is not self._emptied:
            # A decode that is broken off may take the states of sequences that had no part in it.
            self._emptied = self.context.emptied
            self.branches.forget_emptied()
            self.forget_pins()

    # What stays...

    def pin(self, name: str, tokens: Iterable[int]) -> None:
        """Keep a beginning, which must be in the cache now, until `unpin`; it may be paged out.

        Raises UsageError when it is not there, NotSupported where a memory's state is gone.
        """
        arguments.text("name", name)
        key = self.key(tokens)
        self.sync()
        branches = self.branches
        node, length = branches.tree.match(key)
        if length * WIDTH < len(key):
            msg = f"only {length} of {len(key) // WIDTH} tokens are in the cache; decode them first"
            raise UsageError(msg)
        if not branches.partial and (length < node.end or node.entry is None):
            eviction.pin_state(self, node, length)
        self.unpin(name, missing_ok=True)
        node = branches.tree.insert(key)
        node.pins.add(name)
        self.pins[name] = node
        self.settle()

    def unpin(self, name: str, *, missing_ok: bool = False) -> None:
        """Let a pinned beginning go when others are used more; UsageError when there is none."""
        arguments.text("name", name)
        missing_ok = arguments.flag("missing_ok", missing_ok)
        if name not in self.pins and not missing_ok:
            msg = (
                f"nothing is pinned as {arguments.shown(name)}; pinned are: "
                f"{', '.join(self.pins) or 'none'}"
            )
            raise UsageError(msg)
        node = self.pins.pop(name, None)
        if node is not None:
            node.pins.discard(name)
            self.settle(node)

    def page_out(self, tokens: Iterable[int]) -> None:
        """Page the branch of these tokens out; UsageError when it is not there, leased or in part.

        Raises PagingError with nothing changed.
        """
        node = self._branch(tokens)
        if self.branches.pager is None:
            msg = "this cache pages nothing out; make it with paging='memory' or a folder"
            raise UsageError(msg)
        if node.page is None:
            if not self.branches.removable(node, frees_id=True):
                msg = f"{node} cannot be paged out: it is leased, or others go on from it"
                raise UsageError(msg)
            eviction.evict(self, node)
            self.enforce(0)

    def page_in(self, tokens: Iterable[int]) -> None:
        """Bring the branch of these tokens in again; PagingError with nothing changed."""
        node = self._branch(tokens)
        if node.page is not None:
            if not eviction.make_page_room(self, node):
                msg = f"no room for a branch of {node.end} tokens: release leases or unpin others"
                raise PagingError(msg)
            branch_pages.page_in(self.branches, node)
            self.counts["paged_in"] += 1

    def _branch(self, tokens: Iterable[int]) -> Node:
        key = self.key(tokens)
        self.sync()
        node, length = self.branches.tree.match(key)
        if length * WIDTH < len(key) or length < node.end:
            msg = f"no branch has just these {len(key) // WIDTH} tokens"
            raise UsageError(msg)
        return node

    def evict(self) -> bool:
        """Drop the branch used longest ago; False when everything is leased or pinned."""
        self.sync()
        node = eviction.droppable(self)
        if node is not None:
            self.branches.drop(node)
            self.counts["evicted"] += 1
        self.settle()
        return node is not None

    def clear(self) -> None:
        """Drop everything that is neither leased nor pinned."""
        while self.evict():
            pass

    # Itself...

    def check_budget(self, tokens: int) -> None:
        """Raise BudgetTooSmall when so many tokens alone are more than the budget."""
        tokens = arguments.whole("tokens", tokens, 0)
        needed = self.branches.bytes_of(tokens)
        if self.budget is not None and needed > self.budget:
            msg = (
                f"{tokens} tokens take {needed} bytes and the budget is {self.budget}; give the "
                "cache a larger budget, or the context smaller cache types"
            )
            raise BudgetTooSmall(msg, needed=needed, budget=self.budget)

    def enforce(self, tokens: int) -> None:
        """Drop what is over the budget, were so many more tokens decoded."""
        tokens = arguments.whole("tokens", tokens, 0)
        while self.budget is not None and self.size + self.branches.bytes_of(tokens) > self.budget:
            node = eviction.droppable(self)
            if node is None:
                break
            self.branches.drop(node)
            self.counts["evicted"] += 1

    @property
    def size(self) -> int:
        """Return the bytes of all branches, resident and paged."""
        return self.branches.resident_bytes + self.branches.paged_bytes

    def key(self, tokens: Iterable[int]) -> bytes:
        """Return checked tokens as the tree compares them."""
        self._check_open()
        numbers = as_int32(tokens, "tokens")
        if not len(numbers):
            msg = "expected a prompt of at least one token; an empty one leaves nothing to decode"
            raise UsageError(msg)
        bad = outside(numbers, self.context.n_vocab)
        if bad is not None:
            msg = (
                f"token {bad} is out of range: this model has tokens 0..{self.context.n_vocab - 1}"
            )
            raise UsageError(msg)
        longest = self.size_limit
        if longest is not None and len(numbers) > longest:
            msg = f"the prompt has {len(numbers)} tokens and a sequence at most {longest}"
            raise UsageError(msg)
        return numbers.tobytes()

    def settle(self, *nodes: Node) -> None:
        """Tidy nodes up after a change."""
        for node in nodes:
            self.branches.tidy(node)
        self.forget_pins()

    def forget_pins(self) -> None:
        """Forget the names of what was given up: its page was damaged, or its state lost."""
        self.pins = {name: node for name, node in self.pins.items() if name in node.pins}

    def stats(self) -> PrefixStats:
        """Count what there is and what was done."""
        return measure(self)

    def dump(self) -> str:
        """Draw the tree, a line per node."""
        return draw(self)

    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold."""
        prefix_checking.check(self)

    def _check_open(self) -> None:
        self.context.check()
        if self.closed:
            msg = "this cache was closed; make another"
            raise Closed(msg)

    def close(self) -> None:
        """Close the cache's sequences, leased ones as well; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for sequence in list(self.branches.sequences()):
            sequence.close()
        if self.branches.pager is not None:
            self.branches.pager.close()

    def __enter__(self) -> PrefixCache:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PrefixCache {'closed' if self.closed else self.stats()}>"
