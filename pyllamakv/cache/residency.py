"""Keep sequences at the nodes of a radix tree, by the kind of memory of the context.

There is one class per kind; `kind_of` is the only place that decides between them.

- `UnifiedCells`: a unified attention cache. Sequences share the cells of common prefixes. The
  sequence at a leaf contains every node above it, and a page only tokens that no other branch has.
- `OwnCells`: a stream per sequence, or windows in a cache of full size. Sequences can be trimmed;
  each one is whole, also in a page.
- `Windows`: a sliding window forgets cells, so that decoding continues from the end of a branch, or
  from recent positions.
- `States`: recurrent and hybrid memories cannot go back at all. Decoding continues from the end of
  a branch or a saved state, and a cancelled decode empties all sequences.

Each finds the longest prefix that a prompt can continue (`longest_prefix`), takes sequences in
(`keep`), gives them up (`page_out`, `drop`) and brings them back (`page_in`). Prefix and slot
caches, allocation and tiers test no type of memory: they ask these classes, `shares_cells` or
`stores_parts`. `ContextCache` has rules of its own, in `checkpoints`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import prefix_states
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.checkpoints import starts_after_clear
from pyllamakv.cache.prefix_states import StatePoints
from pyllamakv.cache.radix_tree import (
    TOKEN_BYTES,
    RadixTree,
    WholePageTree,
    common,
    tokens_to_key,
)
from pyllamakv.cache.tier import MemoryTier
from pyllamakv.errors import (
    NativeError,
    PagingError,
    PartialRemovalRefused,
    Unsupported,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from collections.abc import Sequence as Many

    from pyllamakv.cache.allocation import Allocator
    from pyllamakv.cache.checkpoints import CheckpointSchedule
    from pyllamakv.cache.eviction_policy import EvictionPolicy
    from pyllamakv.cache.lease import PrefixLease, SequenceLease
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.tier import Page, PageTier, PrefixTier
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

LOG = logging.getLogger("pyllamakv.cache")


class Residency:
    """The tree and its sequences, at most ``limit``: what all kinds of memory have in common.

    ``before_drop`` is called with a branch whose sequence is about to be closed, dropped or paged
    out. ``policy`` ranks branches for eviction. Without a ``tier``, up to ``host`` bytes of pages
    are in host memory.
    """

    #: Whether a sequence can be trimmed to any length, so that a longer one contains the shorter.
    _trims = True
    #: Whether a prefix must end where a branch does.
    _exact = False
    #: Whether a page has a whole sequence.
    _whole_pages = True
    #: Maximum number of children of a node that may be dropped.
    _most_children = 1
    #: Whether a branch may be dropped instead of paged out.
    _pages_optional = False
    #: Whether a cancelled decode empties all sequences.
    loses_all = False

    def __init__(
        self,
        context: Context,
        limit: int,
        tier: PageTier | None,
        schedule: CheckpointSchedule,
        before_drop: Callable[[Node], None] | None = None,
        policy: EvictionPolicy | None = None,
        host: int = 0,
    ) -> None:
        self.context, self.limit, self.schedule = context, limit, schedule
        self._before_drop = before_drop
        self._host = host
        #: Where branches are paged out to; None: they are dropped.
        self.tier = self._default_tier() if tier is None else tier
        #: Pages of parked leases, if there is no tier.
        self._parking = MemoryTier()
        #: Whether this release starts no recurrent sequence in place of a removed one.
        self._leaves = starts_after_clear(context)
        self._left = False
        self.tree = (WholePageTree if self._whole_pages else RadixTree)(policy)
        self.taken = 0
        self.cell_bytes = _cell_bytes(context)
        #: Totals of tokens, as in `PrefixStats`.
        self.evicted_tokens = self.paged_out_tokens = self.paged_in_tokens = 0
        #: Bytes of a sequence that do not depend on its length: its states.
        self.state_bytes = 0
        #: Returns the bytes of the backups of unfinished prompts.
        self._backup_bytes: Callable[[], int] = int

    def _default_tier(self) -> PageTier | None:
        """Return where branches are paged out to if the cache names no tier."""
        self._pages_optional = self._host > 0 and prefix_states.saves(self.context)
        return MemoryTier() if self._pages_optional else None

    # Sequences...

    @property
    def vacant(self) -> int:
        """Return how many more sequences may be made now."""
        return max(0, min(self.limit - self.taken, len(self.context.vacant)))

    @property
    def alone(self) -> bool:
        """Return whether the context has no other sequences than these."""
        return self.context.info.n_seq_max - len(self.context.vacant) == self.taken

    def foreign(self) -> int:
        """Return how many tokens others' sequences have, at most."""
        ours = {each.id for each in self.sequences()}
        return sum(len(own) for i, own in enumerate(self.context.ledgers) if i not in ours)

    @property
    def can_start(self) -> bool:
        """Return whether `new` can return a sequence that starts at position 0, or evictions help.

        On releases that start none in place of a removed one, an eviction of a single branch for
        its sequence does not.
        """
        empty = len(self.context.vacant) == self.context.info.n_seq_max
        return empty or not self.must_clear(removing=not self.vacant)

    def must_clear(self, *, removing: bool = False) -> bool:
        """Return whether this release starts no sequence before the context is cleared.

        ``removing``: a sequence with tokens is removed before.
        """
        return self._leaves and (self._left or removing)

    def record_removed(self, tokens: int) -> None:
        """Record that a sequence with so many tokens was removed."""
        self._left |= tokens > 0

    def clear_empty(self) -> None:
        """Clear a context without tokens, if its memory needs that before sequences start."""

    @property
    def starting(self) -> bool:
        """Return whether a leased sequence could not start any more if another one was removed."""
        return self._leaves and any(not len(lease.ledger) for lease in self.tree.root.leases)

    def new(self) -> Sequence:
        """Open an empty sequence."""
        sequence = self.context.sequence()
        self.taken += 1
        return sequence

    def fork(self, source: Sequence, length: int) -> Sequence:
        """Open a sequence that shares the first tokens of another one."""
        sequence = source.fork(length)
        self.taken += 1
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Release a sequence."""
        sequence.close()
        self.taken -= 1
        self._left = True

    def source(self, node: Node, beside: Node | None = None, *, exact: bool = False) -> Sequence:
        """Return a sequence with a node, but none at or below ``beside``; entries are preferred.

        If sequences cannot be trimmed, or with ``exact``, one that ends with the node comes first.
        """
        if (exact or not self._trims) and node.entry is None and node.leases:
            return node.leases[0].sequence  # type: ignore[no-any-return]
        waiting, leased = [node], None
        while waiting:
            each = waiting.pop()
            if each.entry is not None:
                return each.entry  # type: ignore[no-any-return]
            if each.leases and leased is None:
                leased = each.leases[0].sequence
            waiting += [
                low for low in each.children.values() if low.ref_count and low is not beside
            ]
        assert leased is not None, f"{node} is not held"
        return leased  # type: ignore[no-any-return]

    def attach(self, node: Node, sequence: Sequence) -> None:
        """Make a sequence the entry of a node with the same tokens."""
        self.tree.attach(node, sequence)
        self._forget_pages(node)

    def detach(self, node: Node) -> Sequence:
        """Remove the entry of a node."""
        sequence: Sequence = self.tree.detach(node)
        return sequence

    def lease(self, node: Node, lease: object) -> None:
        """Attach a lease to a node."""
        self.tree.lease(node, lease)
        self._forget_pages(node)

    def unlease(self, node: Node, lease: object) -> None:
        """Detach a lease from a node; unused nodes remain until they are pruned."""
        self.tree.unlease(node, lease)

    def _forget_pages(self, node: Node) -> None:
        """Drop the pages of a node that is in the cache now, and of those above it."""
        for each in node.path:
            self.forget_page(each)

    def forget_page(self, node: Node) -> None:
        """Remove the page of a node, and drop it if no other node needs it."""
        unused = self.tree.set_page(node, None)
        if unused is not None:
            unused.drop()

    def keep(self, node: Node, sequence: Sequence) -> None:
        """Make a leased sequence the entry of a node."""
        self.attach(node, sequence)
        # The longer sequence contains the shorter ones.
        for above in node.path[:-1]:
            if above.entry is not None:
                self.close(self.detach(above))

    def tidy(self, node: Node) -> None:
        """Remove unused nodes and merge unneeded ones, from a node upwards."""
        path = node.path
        self.tree.prune(node)
        for each in path:
            self.tree.merge(each)

    def storage(self, node: Node) -> PageTier | None:
        """Return where a node is paged out to; None: it is dropped."""
        if self.tier is None:
            return self._parking if node.parked else None
        if self._limited(node) and self.page_bytes(node) > self._host:
            return None
        return self.tier

    def _limited(self, node: Node) -> bool:
        """Return whether a node's page must fit into the host memory of pages."""
        return self._host > 0 and not node.protected

    def page_bytes(self, node: Node) -> int:
        """Return the minimum bytes of a node's page, before it is saved."""
        start = 0 if self._whole_pages else self._alone(node)[-1].start
        return self.bytes_of(node.end - start)

    def too_large(self, node: Node, size: int) -> StateTooLarge:
        """Create the error for a page that alone exceeds the host memory of pages."""
        return StateTooLarge(
            f"a page of {node.end} tokens has {size} bytes and the host memory of pages is "
            f"{self._host}; increase paging, or decode the tokens again"
        )

    def unpark(self, node: Node) -> None:
        """Count a parked lease less, and drop the page that was for it alone."""
        node.unpark()
        self.drop_unneeded_pages(node)

    def drop_unneeded_pages(self, node: Node) -> None:
        """Without a tier, drop pages that a pin or a parked lease at this node alone needed."""
        if self.tier is None:
            if self._whole_pages:
                for each in list(node.walk()):
                    if each.page is not None and not each.protected and not self.only_page(each):
                        self.forget_page(each)
                        self.tidy(each)
            while not node.children and node.bare and node.linked and not self.only_page(node):
                above = node.parent
                self.forget_page(node)
                self.tree.prune(node)
                if above is None or above.parent is None:
                    break
                node = above
        self.tidy(node)

    # Prompts...

    def has(self, node: Node) -> bool:
        """Return whether sequences have the content of a node, so that it can be continued."""
        return node.ref_count > 0

    def resumes(self, node: Node, length: int) -> bool:
        """Return whether a prompt can continue after ``length`` tokens, which end in a node."""
        return True

    def returns(self, length: int, position: int) -> bool:
        """Return whether a sequence of ``length`` tokens may continue at an earlier position."""
        return True

    def gives(self, node: Node, *, unneeded: bool) -> bool:
        """Return whether a prompt may get the sequence of a node, instead of a fork.

        ``unneeded``: no pin, parked lease or child needs it.
        """
        return unneeded

    def pages_first(self, node: Node) -> bool:
        """Return whether the content of a node is paged out before a prompt gets its sequence."""
        return False

    def longest_prefix(
        self,
        key: bytes,
        salt: bytes,
        groups: Many[Group] = (),
        *,
        exact: bool = False,
        pages: bool = True,
    ) -> tuple[Node, int, Node | None]:
        """Return the node in which a prompt's longest usable prefix ends, and the prefix's length.

        One token is left to decode, and the prefix ends in no group. If no sequence has it, the
        third is the node to page in before. ``exact``: it ends where a branch does. ``pages``:
        content of pages counts.
        """
        node, length = self._prefix_end(key, salt, groups, exact=exact or self._exact, pages=pages)
        there = node.entry is not None or node.leases if exact or self._exact else node.ref_count
        return node, length, self._page_holder(node) if length and not there else None

    def _prefix_end(
        self, key: bytes, salt: bytes, groups: Many[Group], *, exact: bool, pages: bool
    ) -> tuple[Node, int]:
        node, length = self.tree.match(key, salt)
        length = min(length, len(key) // TOKEN_BYTES - 1)  # one token is left to decode
        path = node.path
        if exact:
            end = self._branch_end(path, length, groups, pages=pages)
            return end, end.end
        if not pages:
            length = min(length, max((each.end for each in path if each.ref_count), default=0))
        length = grouping.floor(groups, length)
        ends = (each for each in path if each.end >= length > each.start)
        return next(ends, self.tree.root), length

    def _branch_end(
        self, path: list[Node], length: int, groups: Many[Group], *, pages: bool = True
    ) -> Node:
        """Return the last node of a path, up to a length, where a branch ends; else the root."""
        for each in reversed(path):
            kept = each.entry is not None or each.leases or (pages and each.page is not None)
            if kept and each.end <= length and grouping.floor(groups, each.end) == each.end:
                return each
        return self.tree.root

    def longest_state(
        self, key: bytes, salt: bytes, groups: Many[Group] = (), *, touch: bool = True
    ) -> Node:
        """Return the node of the longest prefix of a key that has content; the root: none has.

        ``touch`` records a use of it.
        """
        node, length = self.tree.match(key, salt)
        found = self._branch_end(node.path, length, groups)
        if touch and found is not self.tree.root:
            self.tree.touch(found)
        return found

    def save_state(self, node: Node, sequence: Sequence) -> None:
        """Save the state of a sequence as the page of its node. Raises StateTooLarge."""
        assert self.tier is not None
        saved = sequence.save(portable=False)
        self.tree.set_page(node, self.write_page(self.tier, saved, 0, node.end))

    def save_prefix(self, sequence: Sequence, salt: bytes) -> int:
        """Save the state of a sequence that is not in the tree; return how many others it evicts.

        Nothing is saved twice, or without a tier. Raises StateTooLarge, and errors of the save.
        """
        if self.tier is None:
            return 0
        node, evicted = self.tree.insert(tokens_to_key(sequence.ledger.tokens), salt), 0
        try:
            if node.page is None:
                self.save_state(node, sequence)
                self.tree.touch(node)
                evicted = self.drop_surplus()
        finally:
            self.tidy(node)
        return evicted

    def load_stored(
        self,
        tier: PrefixTier,
        allocator: Allocator,
        key: bytes,
        salt: bytes,
        groups: Many[Group],
        *,
        exact: bool = False,
    ) -> None:
        """Load the longest stored prefix of a prompt that this memory can continue."""
        tier.load(allocator, key, salt, groups, exact=exact or not self._trims)

    def _page_holder(self, node: Node) -> Node:
        """Return a node whose page has the tokens of a node that no sequence has."""
        return next(each for each in node.walk() if each.page is not None)

    def diverging(self, key: bytes, salt: bytes, leases: Iterable[SequenceLease]) -> set[int]:
        """Return the lengths at which a prompt diverges from others and a state is needed."""
        return set()

    def points(
        self,
        prompt: int,
        cached: int,
        diverging: Iterable[int],
        named: Iterable[int],
        groups: Many[Group],
    ) -> StatePoints | None:
        """Return where states of a prompt are due; None: this memory needs none."""
        return None

    def shareable(self, known: int) -> int:
        """Return how many of the ``known`` tokens of a prefix a new sequence can share."""
        return 0

    @property
    def writes_states(self) -> bool:
        """Return whether the state of a lease goes to a page; else a vacant sequence keeps it."""
        return False

    def most_cells(self, leases: Iterable[PrefixLease]) -> int | None:
        """Return the maximum number of cells that the branches use; None: read the cells."""
        return None

    # Parting...

    def leased(self, leases: Iterable[PrefixLease]) -> set[Node]:
        """Return the nodes whose tokens leases need."""
        return {each for lease in leases for each in lease.node.path}

    def next_dropped(self, leases: Iterable[PrefixLease]) -> Node | None:
        """Return the next branch to drop, resident or paged; None if all must stay."""
        if self.starting:
            return None
        protected = self.leased(leases)

        def wanted(node: Node) -> bool:
            keeps = node.entry is not None or node.page is not None
            free = keeps and not node.protected and node not in protected
            return free and len(node.children) <= self._most_children and not self.only_page(node)

        return self._least(wanted)

    def _least(self, wanted: Callable[[Node], bool]) -> Node | None:
        return self.tree.evict_first(wanted)

    def may_lose(self, node: Node, error: PagingError) -> bool:
        """Return whether a branch may be dropped because it could not be paged out."""
        if node.pins:
            return False
        return self._pages_optional or isinstance(error, StateTooLarge) or node.parked > 0

    def freed(self, before: int) -> int | None:
        """Return how many cells were freed since so many tokens were held; None: read the cells."""
        return None

    def keeps_head(self, node: Node, head: Node) -> bool:
        """Return whether an evicted branch must leave the tokens up to the end of ``head``."""
        return False

    def _needed(self, node: Node) -> bool:
        """Return whether leases or other branches need the sequence of a node."""
        return bool(node.leases) or node.ref_count != 1

    def _holds(self, node: Node) -> bool:
        """Return whether leases at a node need the tokens above it."""
        return bool(node.leases)

    def _inherits(self, parent: Node) -> bool:
        """Return whether a node needs the sequence of a child that is dropped."""
        return parent.protected

    def _alone(self, node: Node) -> list[Node]:
        """Return the nodes that a page of a branch contains, from its end upwards."""
        return [node]

    def removable(self, node: Node, *, frees_id: bool) -> bool:
        """Return whether a node's sequence can be paged out, or dropped if there are no pages."""
        if node.entry is None or self._needed(node) or self.starting:
            return False
        if self.storage(node) is not None:
            return True
        if node.protected:
            return False
        heir = self.heir(node) if frees_id else None
        return heir is None or not heir.protected or self.storage(heir) is not None

    def drop(self, node: Node, keep: int = 0) -> Sequence | None:
        """Drop the entry and page of a node; return its sequence with ``keep`` tokens, if any."""
        heir, kept, count = self.heir(node), None, 0
        if node.entry is not None or node.page is not None:
            first = 0 if self._whole_pages else node.start
            count = node.end - min(max(keep, first), node.end)
        if node.entry is not None:
            if self._before_drop is not None:
                self._before_drop(node)
            sequence: Sequence = node.entry
            if keep:
                sequence.trim(keep)  # counted only if the memory does not refuse it
            elif heir is not None and not _trimmed(sequence, heir.end):
                heir.unprotect()
                heir = None
            self.detach(node)
            if keep:
                kept = sequence
            elif heir is not None:
                self.attach(heir, sequence)
            else:
                self.close(sequence)
        self.evicted_tokens += count
        self.forget_page(node)
        self.tidy(node)
        return kept

    def drop_tail(self, node: Node, tokens: int) -> None:
        """Drop a branch to free about so many tokens: if possible, only its last blocks."""
        self.drop(node)

    def heir(self, node: Node) -> Node | None:
        """Return the node above that keeps the sequence of a dropped one, if it needs one."""
        parent = node.parent
        # Tokens that nothing else needs go with the branch, also those of another list.
        while parent is not None and parent.parent is not None and not self._inherits(parent):
            if self._whole_pages or not parent.bare or len(parent.children) > 1:
                break
            parent = parent.parent
        if node.entry is None or parent is None or parent.parent is None:
            return None
        return parent if self._inherits(parent) and parent.ref_count == 1 else None

    def only_page(self, node: Node) -> bool:
        """Return whether a pinned or parked node above has no content but this node's page."""
        if node.page is None or not self._whole_pages:
            return False
        return any(
            each.protected
            and not each.ref_count
            and not any(low.page is not None for low in each.walk() if low is not node)
            for each in node.path[:-1]
        )

    def forget_emptied(self) -> None:
        """Part with entries that a broken-off decode emptied, and with pins that no page has."""
        entries = [node for node in self.tree.walk() if node.entry is not None]
        lost = [node for node in entries if node.end and not len(node.entry.ledger)]
        for node in lost:
            self.close(self.detach(node))
            if node.page is None:
                node.unprotect()
        for node in lost:
            self.tidy(node)

    # Pages...

    def discard(self, page: Page) -> None:
        """Drop all nodes that cannot be restored without this page; none of them is leased."""
        top = next(node for node in self.tree.walk() if node.page is page)
        above = top.parent
        for each in [top] if self._whole_pages else list(top.walk())[::-1]:
            each.unprotect()
            self.forget_page(each)
            self.tree.prune(each)
        if above is not None:
            self.tidy(above)

    def page_out(self, node: Node, keep: int = 0) -> Sequence | None:
        """Save the tokens of this node's sequence alone, then close or trim it to ``keep`` tokens.

        Raises PagingError with nothing changed.
        """
        sequence: Sequence = node.entry
        if node.page is not None:
            return self._close_paged(node, keep)
        tier = self.storage(node)
        assert tier is not None
        if self._before_drop is not None:
            # A flush does not read pages, so their tokens are written before.
            self._before_drop(node)
        chain = self._alone(node)
        start = 0 if self._whole_pages else chain[-1].start
        saved = self._save(sequence, chain[-1], start)
        if self._limited(node) and len(saved) > self._host:
            raise self.too_large(node, len(saved))
        page = self.write_page(tier, saved, start, node.end)
        try:
            if keep:
                sequence.trim(keep)
        except PartialRemovalRefused:
            page.drop()
            raise
        for each in chain:
            self.tree.set_page(each, page)
        return self._close_paged(node, 0) if not keep else self._detach_paged(node)

    def _close_paged(self, node: Node, keep: int) -> Sequence | None:
        """Detach a sequence whose node has a page; close it, or trim it to ``keep`` tokens."""
        sequence: Sequence = node.entry
        if keep:
            sequence.trim(keep)
            return self._detach_paged(node)
        self._detach_paged(node)
        self.close(sequence)
        return None

    def _detach_paged(self, node: Node) -> Sequence:
        sequence = self.detach(node)
        self.tidy(node)
        return sequence

    def write_page(self, tier: PageTier, saved: bytes, start: int, end: int) -> Page:
        """Store a page. Raises StateTooLarge if it alone exceeds the budget of states."""
        page = tier.write(saved, start, end)
        self.paged_out_tokens += end - start
        return page

    def share_budget(self, backup_bytes: Callable[[], int]) -> None:
        """Let the backups of unfinished prompts, so many bytes, share the budget of states."""
        self._backup_bytes = backup_bytes

    def drop_surplus(self) -> int:
        """Drop the least valuable states that exceed the schedule; return the number of branches.

        A branch with a sequence loses its page only.
        """
        dropped = 0
        while (node := self.surplus()) is not None:
            if node.entry is None:
                self.drop(node)
                dropped += 1
            else:
                self.forget_page(node)
        return dropped

    def surplus(self) -> Node | None:
        """Return the next page to drop if those in host memory exceed their limit."""
        if not self._host or self.pages.size <= self._host:
            return None

        def wanted(node: Node) -> bool:
            unused = node.page is not None and not node.ref_count and not node.protected
            return unused and len(node.children) <= self._most_children and not self.only_page(node)

        return self._least(wanted)

    def size_of(self, node: Node) -> int:
        """Return the bytes of the entry and the page of a node."""
        page = node.page.size if node.page is not None else 0
        return page + (self.bytes_of(node.end) if node.entry is not None else 0)

    def _save(self, sequence: Sequence, top: Node, start: int) -> bytes:
        assert top.parent is not None
        beside = self.source(top.parent, top) if start else None
        try:
            if beside is None:
                return sequence.save(portable=False)
            sequence.remove(0, start)
            try:
                return sequence.save(portable=False)
            finally:
                sequence.share(beside, 0, start)
        except WorkerDied:
            raise
        except (NativeError, Unsupported, MemoryError) as error:
            msg = f"a branch of {top.end} tokens could not be saved: {error}"
            raise PagingError(msg) from error

    def missing(self, node: Node) -> list[Page]:
        """Return the pages that a node needs, from the root down, to be in the cache."""
        return [node.page]

    def page_in(self, node: Node) -> None:
        """Page a node and all above it in. Needs an empty sequence per page, at most two.

        Raises PagingError, or DamagedPage if a retry cannot succeed. Nothing is changed then.
        """
        pages = self.missing(node)
        first = node
        if not self._whole_pages:
            first = next(each for each in node.path if not each.ref_count)
        covered = 0 if self._whole_pages else first.start
        made: list[Sequence] = []
        try:
            sequence = self._restore(pages[-1], made)
            sequence.trim(node.end - pages[-1].start)
            low = max(covered, pages[-1].start)
            if low > pages[-1].start:
                sequence.remove(None, low)
            for page in reversed(pages[:-1]):
                other = self._restore(page, made)
                begin = max(covered, page.start)
                sequence.share(other, begin, low)
                low = begin
                self.close(made.pop())
            if covered:
                sequence.share(self.source(first.parent or node), 0, covered)
            if tokens_to_key(sequence.ledger.tokens) != node.key:
                msg = f"a page of {node.end} tokens contains other tokens; decode them again"
                raise DamagedPage(PagingError(msg), pages[-1])
            made.clear()
        except WorkerDied:
            raise
        except (NativeError, UsageError) as error:
            msg = f"a branch of {node.end} tokens could not be paged in: {error}"
            raise PagingError(msg) from error
        finally:
            for each in made:
                self.close(each)
        self.attach(node, sequence)
        self.tidy(node)

    def _restore(self, page: Page, made: list[Sequence]) -> Sequence:
        try:
            saved = page.read()
        except PagingError as error:
            raise DamagedPage(error, page) from error
        sequence = self.new()
        made.append(sequence)
        sequence.restore(saved)
        self.paged_in_tokens += page.end - page.start
        if sequence.positions != list(range(page.start, page.end)):
            msg = (
                f"a page contains other tokens than positions {page.start}..{page.end}; decode "
                f"them again"
            )
            raise DamagedPage(PagingError(msg), page)
        return sequence

    # Numbers...

    def sequences(self) -> Iterator[Sequence]:
        """Yield the sequences of all entries and leases."""
        for node in self.tree.root.walk():
            if node.entry is not None:
                yield node.entry
            yield from (lease.sequence for lease in node.leases)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes that a sequence of so many tokens takes, shared with none."""
        return tokens * self.cell_bytes + self.state_bytes

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of the branches in the cache, shared cells counted once."""
        return sum(self.bytes_of(len(each)) for each in self.sequences())

    @property
    def cells(self) -> int:
        """Return how many cells the branches use."""
        return sum(map(len, self.sequences()))

    @property
    def pages(self) -> PageTier:
        """Return the tier that has all pages: that of evicted branches, or that of parked ones."""
        return self.tier or self._parking

    def reclaimable(self, protected: Collection[Node], head: tuple[Node, int] | None = None) -> int:
        """Return how many cells would be free with everything removable gone but ``protected``.

        ``head`` is a node whose tokens up to a length stay as well.
        """
        going = self._going(protected)
        ids = {node.entry.id for node in going if node.entry is not None}
        staying = [i for i in range(self.context.info.n_seq_max) if i not in ids]
        found = -head[1] if head is not None else 0
        for cells in self.context.kv.snapshot().streams:
            if not cells.swa:
                stay = np.logical_or.reduce([cells.has(i) for i in staying] or [~cells.used])
                found += int((cells.used & ~stay).sum())
        return max(0, found)

    def _going(self, protected: Collection[Node]) -> list[Node]:
        """Return the nodes that could be removed, but for ``protected`` ones."""
        kept = set(protected)
        for node in self.tree.walk():
            if self._holds(node) or (node.protected and self.storage(node) is None):
                kept.update(node.path)
        return [node for node in self.tree.walk() if node not in kept]

    # Checks...

    def check(self, node: Node) -> None:
        """Raise AssertionError if a node and its content differ, which is a defect."""
        entry = node.entry
        if entry is not None:
            assert entry.open, f"the sequence of {node} was closed"
            assert tokens_to_key(entry.ledger.tokens) == node.key, (
                f"the sequence of {node} has other tokens"
            )
            assert entry.positions == list(range(node.end)), f"the sequence of {node} has gaps"
            # Some releases report a recurrent state of one token as empty.
            if self._trims or node.end > 1:
                assert entry.pos_max == node.end - 1, f"the cache has not all of {node}"
        if self._trims:
            assert not (node.ref_count and node.page), f"{node} is resident and paged out"
        if not node.children:
            kept = entry is not None or node.leases or node.page is not None
            assert kept, f"{node} is a leaf that keeps nothing"

    def check_cells(self, used: int) -> None:
        """Check nothing: the number of used cells does not follow from that of tokens."""


class OwnCells(Residency):
    """A stream per sequence, or windows in a cache of full size.

    A window may have passed a position nevertheless, because llama.cpp reuses cells outside of it.
    """


class UnifiedCells(Residency):
    """Sequences of a unified attention cache, which share the cells of common prefixes.

    A page contains only the nodes that no other sequence uses. It is read into a new sequence,
    which then shares the cells of the parents. Pages may overlap, and a page can restore every node
    in it.
    """

    _whole_pages = False
    _most_children = 0

    def _page_holder(self, node: Node) -> Node:
        """Return the node: it has a page, or starts in one of a node above."""
        return node

    def keep(self, node: Node, sequence: Sequence) -> None:
        """Make a leased sequence the entry of a node, sharing as many cells as possible."""
        self._share(node, sequence)
        super().keep(node, sequence)

    def _share(self, node: Node, sequence: Sequence) -> None:
        """Drop cells of tokens that other entries have, and share theirs.

        Prompts that are decoded at the same time do not see each other's tokens; leases may still
        have such cells, so that only entries are shared with.
        """
        for each in reversed([above for above in node.path if above.ref_count]):
            other = next((below.entry for below in each.walk() if below.entry is not None), None)
            if other is None:
                continue
            mine, theirs = sequence.ledger.marks[: each.end], other.ledger.marks[: each.end]
            if mine != theirs:
                first = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                sequence.remove(first, each.end)
                sequence.share(other, first, each.end)
            return

    def storage(self, node: Node) -> PageTier | None:
        """Return where a node is paged out to; None: it is dropped."""
        # The page of a parked branch may start at the end of this node, and needs its tokens.
        if self.tier is None and any(not each.ref_count for each in node.children.values()):
            return self._parking
        return super().storage(node)

    def may_lose(self, node: Node, error: PagingError) -> bool:
        """Return whether a branch may be dropped because it could not be paged out."""
        # Pages below this node are useless without it.
        return (not node.children or self._limited(node)) and super().may_lose(node, error)

    def _limited(self, node: Node) -> bool:
        """Return whether a node's page must fit into the host memory of pages."""
        # Protected pages below this node need its tokens.
        return super()._limited(node) and not any(each.protected for each in node.walk())

    def drop(self, node: Node, keep: int = 0) -> Sequence | None:
        """Drop a node, and the pages below it; return its sequence with ``keep`` tokens, if any."""
        self._drop_below(node)
        return super().drop(node, keep)

    def _drop_below(self, node: Node) -> None:
        """Drop the pages below a node, which need its tokens."""
        for below in list(node.walk())[:0:-1]:
            self.evicted_tokens += len(below)
            self.forget_page(below)
            self.tree.prune(below)

    def shareable(self, known: int) -> int:
        """Return ``known``: sequences share the cells of a common prefix."""
        return known

    def most_cells(self, leases: Iterable[PrefixLease]) -> int | None:
        """Return the maximum number of cells that the branches use."""
        # Leases may have separate cells for tokens that others have decoded too.
        most = self.tree.held_tokens
        for each in leases:
            own = sum(len(node) for node in each.node.path if node.ref_count == 1)
            most += len(each.ledger.tokens) - own
        return most

    def freed(self, before: int) -> int | None:
        """Return how many cells were freed since so many tokens were held."""
        return before - self.tree.held_tokens

    def drop_tail(self, node: Node, tokens: int) -> None:
        """Drop the last tokens of a branch, rounded up to blocks, if the policy allows that.

        A branch keeps its sequence while a token of its own remains.
        """
        policy, parent = self.tree.policy, node.parent
        assert parent is not None, "the root is not dropped"
        own = parent.parent is not None and parent.ref_count == 1
        at = max(node.start, (node.end - tokens) // policy.block * policy.block)
        if node.entry is None or not policy.adaptive or (at == node.start and not own):
            self.drop(node)
            return
        if self._before_drop is not None:
            self._before_drop(node)
        self._drop_below(node)
        head = self.tree.split(node, at) if at > node.start else parent
        sequence = self.detach(node)
        self.attach(head, sequence)
        sequence.trim(at)
        self.evicted_tokens += node.end - at
        self.tidy(node)

    def keeps_head(self, node: Node, head: Node) -> bool:
        """Return whether an evicted branch must leave the tokens up to the end of ``head``."""
        if head.ref_count != 1 or head not in node.path:
            return False
        return self.storage(node) is not None or not self.heir(node)

    def missing(self, node: Node) -> list[Page]:
        """Return the pages that a node needs, from the root down, to be in the cache."""
        path = [each for each in node.path if not each.ref_count]
        pages: list[Page] = []
        low = node.end
        # Pages may overlap: starting at the end, use only what later pages do not contain.
        while low > path[0].start:
            at = next(each for each in path if each.start < low <= each.end)
            pages.insert(0, at.page)
            low = at.page.start
        return pages

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of the branches in the cache, shared cells counted once."""
        return self.tree.held_tokens * self.cell_bytes

    @property
    def cells(self) -> int:
        """Return how many cells the branches use, shared ones counted once."""
        return self.tree.held_tokens

    def reclaimable(self, protected: Collection[Node], head: tuple[Node, int] | None = None) -> int:
        """Return how many cells would be free with everything removable gone but ``protected``.

        ``head`` is a node whose tokens up to a length stay as well.
        """
        going = self._going(protected)
        found = sum(len(node) for node in going if node.ref_count)
        if head is not None and head[0].ref_count and head[0] in going:
            found -= head[1] - head[0].start
        return found

    def check(self, node: Node) -> None:
        """Raise AssertionError if a node and its content differ, which is a defect."""
        super().check(node)
        page = node.page
        there = node.ref_count or (page and page.start <= node.start and node.end <= page.end)
        assert there, f"the tokens of {node} are nowhere"

    def check_cells(self, used: int) -> None:
        """Raise AssertionError unless each held token has one cell."""
        held = self.tree.held_tokens
        assert used == held, f"{held} tokens are held and {used} cells are used"

    def _inherits(self, parent: Node) -> bool:
        return parent.protected or len(parent.children) > 1

    def _alone(self, node: Node) -> list[Node]:
        chain = [node]
        while (above := chain[-1].parent) is not None and above.ref_count == 1:
            if above.parent is None:
                break
            chain.append(above)
        return chain


class Windows(Residency):
    """Sequences of a memory that forgets: decoding continues from the end of a branch.

    Pages are saved states, as many and as large as the schedule allows. Without a tier they are in
    host memory, unless ``before_drop`` stores branches elsewhere.
    """

    _trims = False

    def _default_tier(self) -> PageTier | None:
        """Return host memory, unless evicted branches are stored elsewhere."""
        self._pages_optional = self._before_drop is None or self._host > 0
        saves = self.schedule.size and prefix_states.saves(self.context)
        return MemoryTier() if self._pages_optional and saves else None

    def has(self, node: Node) -> bool:
        """Return whether a sequence ends with a node."""
        return node.entry is not None

    def resumes(self, node: Node, length: int) -> bool:
        """Return whether a sequence ends after ``length`` tokens."""
        return length == node.end and node.entry is not None

    def gives(self, node: Node, *, unneeded: bool) -> bool:
        """Return whether a prompt may get the sequence of a node, instead of a fork."""
        # A page has the same state.
        return node.page is not None or (unneeded and not self.vacant)

    def page_bytes(self, node: Node) -> int:
        """Return 0: a window has forgotten cells, and states are measured when they are saved."""
        return 0

    def pages_first(self, node: Node) -> bool:
        """Return whether the content of a node is paged out before a prompt gets its sequence."""
        # Other prompts may diverge here.
        return node.page is None and self.storage(node) is not None

    def diverging(self, key: bytes, salt: bytes, leases: Iterable[SequenceLease]) -> set[int]:
        """Return the lengths at which a prompt diverges from others, also from leased ones."""
        node, length = self.tree.match(key, salt)
        found = {length, *(each.end for each in node.path if len(each.children) > 1)}
        for lease in leases:
            if lease.salt != salt:
                continue  # a state where they diverge would reveal the other prompt
            ahead = common(lease.key, key)
            if lease.points is not None:
                lease.points.add(ahead, len(lease.ledger))
            found.add(ahead)
        return found

    def points(
        self,
        prompt: int,
        cached: int,
        diverging: Iterable[int],
        named: Iterable[int],
        groups: Many[Group],
    ) -> StatePoints | None:
        """Return where states of a prompt are due."""
        return StatePoints(
            self.schedule, prompt, cached, branches=diverging, named=named, groups=groups
        )

    @property
    def writes_states(self) -> bool:
        """Return whether the state of a lease goes to a page; else a vacant sequence keeps it."""
        # A fork of a sliding window shares its cells, and llama.cpp does not reuse shared ones.
        return self.tier is not None

    def keep(self, node: Node, sequence: Sequence) -> None:
        """Make a leased sequence the entry of a node."""
        self.attach(node, sequence)
        if not self.state_bytes:
            try:
                saved = len(sequence.save(portable=False))
            except (NativeError, Unsupported, MemoryError):
                saved = 0  # no more than an estimate: not worth losing a sequence for
            self.state_bytes = max(1, saved - len(sequence) * self.cell_bytes)

    def write_page(self, tier: PageTier, saved: bytes, start: int, end: int) -> Page:
        """Store a page. Raises StateTooLarge if it alone exceeds the budget of states."""
        if len(saved) > self.schedule.budget:
            msg = (
                f"a state of {end} tokens has {len(saved)} bytes and the budget of checkpoints is "
                f"{self.schedule.budget}; increase it, or decode the tokens again"
            )
            raise StateTooLarge(msg)
        return super().write_page(tier, saved, start, end)

    def surplus(self) -> Node | None:
        """Return the least valuable state if there are more than the schedule allows."""
        tier, most = self.tier, self.schedule
        limit = min(most.budget - self._backup_bytes(), self._host or most.budget)
        if tier is None or (tier.count <= most.size and tier.size <= limit):
            return None

        def wanted(node: Node) -> bool:
            return node.page is not None and not node.protected

        spare = next((each for each in self.tree.walk() if wanted(each) and each.entry), None)
        return spare or prefix_states.least_valuable(
            self.tree,
            wanted,
            lambda node: node.page.size,
        )

    def leased(self, leases: Iterable[PrefixLease]) -> set[Node]:
        """Return no node: states are not needed once they were forked."""
        return set()

    def _least(self, wanted: Callable[[Node], bool]) -> Node | None:
        return prefix_states.least_valuable(self.tree, wanted, self.size_of)

    def _needed(self, node: Node) -> bool:
        return False

    def _holds(self, node: Node) -> bool:
        return False

    def _inherits(self, parent: Node) -> bool:
        return False

    def _forget_pages(self, node: Node) -> None:
        """Keep the pages: a sequence leaves its state."""


class States(Windows):
    """Sequences of a recurrent or hybrid memory, which cannot go back at all."""

    _exact = True
    loses_all = True

    def returns(self, length: int, position: int) -> bool:
        """Return whether a sequence of ``length`` tokens may continue at an earlier position."""
        # A memory of an unknown kind is asked.
        return position == length or self.context.info.can_remove_partly is not False

    def clear_empty(self) -> None:
        """Clear a context without tokens, so that a sequence can start in place of another one."""
        if not any(map(len, self.context.ledgers)):
            self.context.clear()
            self._left = False

    def new(self) -> Sequence:
        """Open an empty sequence."""
        if len(self.context.vacant) == self.context.info.n_seq_max:
            # Some releases cannot start a recurrent sequence in place of another one before a
            # clear.
            self.context.clear()
            self._left = False
        return super().new()

    @property
    def writes_states(self) -> bool:
        """Return whether the state of a lease goes to a page; else a vacant sequence keeps it."""
        return super().writes_states and not self.vacant


def kind_of(context: Context) -> type[Residency]:
    """Return the class for the memory of a context.

    ``swa_full`` gives a sliding window a cache of full size, so that sequences can be trimmed. It
    has no effect on memories with states.
    """
    if context.info.can_remove_partly is False:
        return States
    if context.info.memory is MemoryType.ATTENTION:
        return UnifiedCells if shares_cells(context) else OwnCells
    if context.info.memory is MemoryType.SWA:
        return OwnCells if context.params.swa_full else Windows
    return States


def shares_cells(context: Context) -> bool:
    """Return whether all sequences use the same cells, and one can share those of another."""
    return not context.stream_per_sequence


def stores_parts(context: Context) -> bool:
    """Return whether any part of a stored sequence can be restored and continued.

    A window that passed a position cannot return to it, also in a cache of full size.
    """
    return context.info.memory is MemoryType.ATTENTION


def _trimmed(sequence: Sequence, length: int) -> bool:
    """Trim a sequence; return False if the memory no longer has the window of that position."""
    try:
        sequence.trim(length)
    except PartialRemovalRefused as error:
        LOG.warning("a branch of %d tokens is lost: %s", length, error)
        return False
    return True


def _cell_bytes(context: Context) -> int:
    """Return the bytes of K and V that a token takes, in all caches together."""
    try:
        streams = context.kv.snapshot().streams
    except Unsupported:
        return 0
    found = {
        each.swa: (each.info.bytes_k + each.info.bytes_v) // max(1, each.info.n_cells)
        for each in streams
        if each.info is not None
    }
    return sum(found.values())


class StateTooLarge(PagingError):
    """Report a state that exceeds the budget of states, and can never be paged out."""


class DamagedPage(PagingError):
    """Report a page that can never be read back; ``page`` is the one."""

    def __init__(self, error: PagingError, page: Page) -> None:
        super().__init__(str(error), error.path)
        self.page = page
