"""Give prompts sequences and cells of a context, and evict idle branches for them.

A prompt gets the sequence with its longest cached prefix, or a fork of it. If sequences, cells or
bytes run out, the branch with the lowest priority (see `eviction_policy`) is evicted first, then
the deepest, then the largest, and pinned ones last; never a branch point or a node with a lease. A
branch is paged out if the cache has a tier and host memory suffices for it, else dropped.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.defrag_retry import CellUsage
from pyllamakv.cache.radix_tree import TOKEN_BYTES
from pyllamakv.cache.residency import DamagedPage, shares_cells
from pyllamakv.errors import (
    NativeError,
    NoSlotAvailable,
    PagingError,
    PartialRemovalRefused,
    Unsupported,
    WorkerDied,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Many

    from pyllamakv.cache.lease import PrefixLease
    from pyllamakv.cache.prefix_cache import PrefixCounts
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.residency import Residency
    from pyllamakv.cache.tier import Page, PrefixTier
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.errors import KVCacheFull
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import KVStats

LOG = logging.getLogger("pyllamakv.cache")

#: `Unsupported.reason` of a pin for tokens whose state was not kept.
LOST_STATE = "a state cannot go back"


class Allocator:
    """Assign the sequences and cells of a context to the leases of a prefix cache.

    ``branches`` are its idle sequences and pages, and ``stored`` its store, if it has one.
    """

    def __init__(
        self,
        context: Context,
        branches: Residency,
        counts: PrefixCounts,
        stored: PrefixTier | None = None,
    ) -> None:
        self.context, self.branches, self.counts, self.stored = context, branches, counts, stored
        #: Maximum number of tokens of a sequence; None: no limit.
        self.max_sequence_tokens = capacity(context)
        #: Maximum number of tokens of all sequences; None: no limit, or each has its own cells.
        self._cells = self.max_sequence_tokens if shares_cells(context) else None
        #: The leases that are not released.
        self.leases: list[PrefixLease] = []

    # Prefixes...

    def fork_longest_prefix(
        self, key: bytes, salt: bytes, groups: Many[Group], resumed: Node | None = None
    ) -> tuple[Sequence, int]:
        """Return a sequence with the longest prefix of a prompt, without its last token.

        ``resumed`` is the node of a parked lease, whose sequence may be taken over. Raises
        NoSlotAvailable, or KVCacheFull if the rest cannot fit; the cache is unchanged then.
        """
        exact = False
        while True:
            node, length = self._find(key, salt, groups, exact=exact)
            self.check_cells(len(key) // TOKEN_BYTES - length, node, length)
            try:
                return self._sequence(key, salt, length, resumed, exact=exact), length
            except PartialRemovalRefused:
                # The window has passed that position, also in a cache of full size, where
                # llama.cpp reuses cells outside of the window. Decoding can continue from the end
                # of a branch.
                if exact:
                    raise
                exact = True
                if self.stored is not None and resumed is None:
                    self.branches.load_stored(self.stored, self, key, salt, groups, exact=True)

    def _find(
        self, key: bytes, salt: bytes, groups: Many[Group], *, exact: bool
    ) -> tuple[Node, int]:
        """Return the node in which the usable prefix ends, and the prefix's length.

        ``exact``: the prefix must end where a branch does.
        """
        branches, pages = self.branches, True
        while True:
            node, length, paged = branches.longest_prefix(
                key, salt, groups, exact=exact, pages=pages
            )
            if paged is None:
                return node, length
            pages = self._page_in(paged)

    def _page_in(self, node: Node) -> bool:
        """Page a node in if cells are free; return whether that succeeded."""
        try:
            if not self.make_page_room(node):
                return False
            self.branches.page_in(node)
        except DamagedPage as error:
            LOG.warning("%s; the branch is given up", error)
            self.counts.add("damaged")
            self.branches.discard(error.page)
            return False
        except PagingError as error:
            LOG.warning("%s", error)
            return False
        self.counts.add("paged_in")
        return True

    def _sequence(
        self, key: bytes, salt: bytes, length: int, resumed: Node | None, *, exact: bool
    ) -> Sequence:
        """Return a sequence of the first tokens of a key: new, a fork, or one taken over.

        ``exact``: these are all tokens of a branch, and no longer one may be trimmed to them.
        """
        branches = self.branches
        while True:
            # An eviction may merge nodes, so search the tree again.
            node, _ = branches.tree.match(key[: length * TOKEN_BYTES], salt)
            if length and node.entry is not None and node.end == length:
                parked = node.parked - (node is resumed)
                unneeded = not node.pins and not parked and not node.children
                if branches.gives(node, unneeded=unneeded):
                    if node is resumed or not branches.pages_first(node):
                        return branches.detach(node)
                    taken = self.evict(node, length)
                    assert taken is not None
                    return taken
            source = branches.source(node, exact=exact) if length else None
            if source is None:
                self.make_start()
            if branches.vacant:
                return branches.new() if source is None else branches.fork(source, length)
            kept = [each for each in node.path if each.end <= length]
            evicted = self.next_evicted(kept, frees_id=True)
            if evicted is None and source is not None:
                evicted = _tail(branches, source, length)
            if evicted is None:
                raise self.no_sequence_error()
            heir = branches.heir(evicted) if branches.storage(evicted) is None else None
            if (
                evicted.entry is source
                and source is not None
                and (heir is None or heir.end <= length)
            ):
                taken = self.evict(evicted, length)
                assert taken is not None
                return taken
            self.evict(evicted)

    # Room...

    def next_evicted(self, kept: Iterable[Node], *, frees_id: bool) -> Node | None:
        """Return the node to evict next, excluding ``kept`` and ancestors of leased nodes.

        A state at a branch point is dropped after others, because it serves several prompts, and a
        pinned branch is paged out last.
        """
        branches = self.branches
        protected = {*kept, *branches.leased(self.leases)}
        found = [
            node
            for node in branches.tree.entries
            if node not in protected and branches.removable(node, frees_id=frees_id)
        ]
        found = [node for node in found if not node.pins] or found
        ends = [
            node for node in found if len(node.children) < 2 or branches.storage(node) is not None
        ]
        return branches.tree.evict_first(set(ends or found).__contains__, entries=True)

    def evict(self, node: Node, keep: int = 0, *, short: int | None = None) -> Sequence | None:
        """Page a node out, or drop it without paging; its sequence keeps ``keep`` tokens.

        ``short`` is the number of tokens to drop at least, if only cells are needed.
        """
        branches = self.branches
        if branches.storage(node) is not None:
            try:
                kept = branches.page_out(node, keep)
            except PagingError as error:
                if not branches.may_lose(node, error):
                    raise
                LOG.warning("%s; the branch is dropped", error)
                node.unprotect()
            else:
                self.counts.add("paged_out")
                return kept
        kept = None
        if short is None:
            kept = branches.drop(node, keep)
        else:
            branches.drop_tail(node, short)
        self.counts.add("evictions")
        return kept

    def free_sequences(self, n: int, kept: Iterable[Node]) -> bool:
        """Free sequences by eviction. Returns False, and evicts none, if too few can be evicted."""
        kept = list(kept)
        idle = sum(self._may_go(node, kept) for node in self.branches.tree.entries)
        if self.branches.vacant + idle < n:
            return False
        while self.branches.vacant < n:
            node = self.next_evicted(kept, frees_id=True)
            if node is None:
                return False
            self.evict(node)
        return True

    def _may_go(self, node: Node, kept: Many[Node]) -> bool:
        """Return whether the sequence of a node may be freed, perhaps after those below it."""
        branches = self.branches
        if node in kept or (node.protected and branches.storage(node) is None):
            return False
        if node.children:
            return True
        return branches.removable(node, frees_id=True) and branches.heir(node) not in kept

    def make_start(self) -> None:
        """Empty the context if this release needs that before another sequence can start.

        Idle branches are paged out or dropped. Raises NoSlotAvailable with nothing changed if
        others must stay.
        """
        branches = self.branches
        if branches.can_start:
            return
        entries = [node for node in branches.tree.walk() if node.entry is not None]
        if self.leases or not all(branches.removable(node, frees_id=True) for node in entries):
            msg = (
                "this release starts no recurrent sequence in place of a removed one while others "
                "are leased or pinned: release leases, or use a later release"
            )
            raise NoSlotAvailable(msg, slots=branches.limit)
        for node in entries:
            self.evict(node)

    def keep_state(self, lease: PrefixLease) -> None:
        """Keep the present state of a lease in a vacant sequence, a page or the store.

        Evicts no branch. Failing to store the state is not an error.
        """
        branches, node = self.branches, lease.node
        if node.parent is None or node.entry is not None or node.page is not None:
            return
        try:
            if branches.writes_states:
                branches.save_state(node, lease.sequence)
                self.counts.add("paged_out")
            elif branches.vacant:
                branches.attach(node, branches.fork(lease.sequence, len(lease.sequence)))
            if self.stored is not None and node.entry is None:
                self.stored.keep(node.key, node.salt, lease.sequence)
            branches.tree.touch(node)
        except WorkerDied:
            raise
        except (NativeError, Unsupported, PagingError, MemoryError) as error:
            LOG.warning("the state after %d tokens is not kept: %s", node.end, error)

    def pin_state(self, node: Node, length: int) -> None:
        """Store the state of a lease at a node. Raises Unsupported if it is lost."""
        branches = self.branches
        if length == node.end and node.page is not None:
            return
        if length < node.end or not node.leases:
            msg = f"this memory no longer has a state of {length} tokens: pin it while it is leased"
            raise Unsupported(msg, reason=LOST_STATE)
        if not self.free_sequences(1, node.path):
            raise self.no_sequence_error()
        branches.attach(node, branches.fork(node.leases[0].sequence, length))

    def no_sequence_error(self) -> NoSlotAvailable:
        """Create the error for a cache in which every sequence is in use."""
        limit = self.branches.limit
        if self.branches.starting:
            msg = (
                "this release starts no recurrent sequence after another one is removed, and a "
                "leased one has not started: decode its prompt first, or use a later release"
            )
        else:
            msg = (
                f"all {limit} sequences of this cache are leased or pinned; release "
                "a lease, or create the context with a larger n_seq_max"
            )
        return NoSlotAvailable(msg, slots=limit)

    def make_page_room(self, node: Node) -> bool:
        """Free cells for the pages of a node; return False if that is impossible."""
        above = node.path[:-1]
        pages: list[Page] = []
        while pages != (pages := self.branches.missing(node)):
            wanted = sum(page.end - page.start for page in pages)
            short = self.shortage(wanted, None)
            if short > 0 and short > self.branches.reclaimable(above):
                return False
            if not self.free_sequences(1 + (len(pages) > 1), above):
                return False
            # Evicting for this branch may drop the prefix that its pages follow; then it needs more
            # pages.
            held = next((each for each in reversed(above) if each.ref_count), None)
            if not self._free(wanted, None, above, self.shortage(wanted, None), held):
                return False
        return True

    def make_sequence_room(self, sequences: int, n: int, kept: Iterable[Node]) -> bool:
        """Free sequences, and cells for ``n`` tokens; return whether that succeeded.

        Evicts nothing if it is impossible. A branch below a pinned or shared one may count as
        immovable although it could be evicted.
        """
        kept, branches = list(kept), self.branches
        protected = {*kept, *(each for lease in self.leases for each in lease.node.path)}
        movable = (
            node
            for node in branches.tree.entries
            if node not in protected and branches.removable(node, frees_id=True)
        )
        if branches.vacant + sum(1 for _ in movable) < sequences:
            return False
        short = self.shortage(n, None)
        if short > 0 and short > branches.reclaimable(kept):
            return False
        return self.free_sequences(sequences, kept) and self._free(
            n, None, kept, self.shortage(n, None)
        )

    def certainly_fits(self, n: int, lease: PrefixLease | None) -> bool:
        """Return whether ``n`` more tokens certainly fit, without reading the cells."""
        context, branches, cells = self.context, self.branches, self._cells
        if cells is None:
            return True
        most = None if _needs_holes(context) else branches.most_cells(self.leases)
        if most is None:
            return False
        most += n + sum(each.reserved for each in self.leases if each is not lease)
        if most > cells:
            return False
        return branches.alone or most + branches.foreign() <= cells

    def shortage(self, n: int, lease: PrefixLease | None) -> int:
        """Return how many cells ``n`` more tokens and those granted to other leases lack.

        If cells are missing, leases first lose the cells that they were granted in advance.
        """
        stats = None if self._cells is None else cell_stats(self.context)
        if stats is None:
            return 0
        others = [each for each in self.leases if each is not lease]
        if n + sum(each.reserved for each in others) > stats.free:
            for each in others:
                each.yield_room()
        return n + sum(each.reserved for each in others) - stats.free

    def check_cells(self, n: int, node: Node, length: int) -> None:
        """Raise KVCacheFull unless ``n`` tokens fit after ``length`` tokens up to a node."""
        if self.certainly_fits(n, None):
            return
        short = self.shortage(n, None)
        if short <= 0:
            return
        kept = [each for each in node.path if each.end <= length]
        if short > self.branches.reclaimable(kept, None if node in kept else (node, length)):
            raise self.full(n)

    def make_cells(self, n: int, lease: PrefixLease) -> None:
        """Free cells for ``n`` more tokens of a lease, or raise KVCacheFull."""
        longest = self.max_sequence_tokens
        if longest is not None and len(lease.ledger) + n > longest:
            raise self.full(n)
        if self.certainly_fits(n, lease):
            return
        short = self.shortage(n, lease)
        if short > 0 and short > self.branches.reclaimable(()):
            raise self.full(n)
        if not self._free(n, lease, (), short):
            raise self.full(n)

    def _free(
        self,
        n: int,
        lease: PrefixLease | None,
        kept: Iterable[Node],
        short: int,
        head: Node | None = None,
    ) -> bool:
        """Evict until the cells suffice. Returns False if nothing is left to evict.

        If cells are shared, the tokens up to the end of ``head`` remain in the cache.
        """
        kept, context, branches = list(kept), self.context, self.branches
        while short > 0:
            node = self.next_evicted(kept, frees_id=False)
            if node is None:
                return False
            held = branches.tree.held_tokens
            if head is not None and branches.keeps_head(node, head):
                rest = self.evict(node, head.end)
                assert rest is not None
                branches.attach(head, rest)
            else:
                self.evict(node, short=short)
            # Reading the cells costs more than counting evicted tokens, so they are read once at
            # the end.
            freed = branches.freed(held)
            short -= freed or 0
            if freed is None or short <= 0:
                short = self.shortage(n, lease)
        if _needs_holes(context):
            stats = cell_stats(context)
            if stats is not None and stats.largest_hole < min(n, stats.free):
                with suppress(Unsupported):
                    context.kv.defrag()
        return True

    def full(self, n: int) -> KVCacheFull:
        """Create the error for ``n`` tokens without free cells."""
        there = CellUsage.of(self.context, cell_stats(self.context))
        msg = (
            f"no free cells for {n} more tokens: {there.used} of {there.cells} cells are used, "
            "mostly by leases and pinned branches; release a lease, or create the context with a "
            "larger n_ctx"
        )
        return there.full(msg, n)


def _tail(branches: Residency, source: Sequence, length: int) -> Node | None:
    """Return the node of a sequence that may be cut although something pinned depends on it."""
    node = next((each for each in branches.tree.entries if each.entry is source), None)
    if node is None or not branches.removable(node, frees_id=False):
        return None
    heir = branches.heir(node)
    return node if heir is None or heir.end <= length else None


def cell_stats(context: Context) -> KVStats | None:
    """Count the cells, or return None where tokens need none, or nothing can be seen."""
    try:
        stats = context.kv.stats
    except Unsupported:
        return None
    return stats if stats.size else None


def capacity(context: Context) -> int | None:
    """Return the maximum number of tokens of a sequence, or None."""
    found = cell_stats(context)
    if found is None:
        return None
    return found.size // context.partitions


def _needs_holes(context: Context) -> bool:
    """Return whether micro-batches need one hole that a decode does not create automatically."""
    heals = Capability.DEFRAG_OPTIONS in context.native.about.capabilities
    return context.info.contiguous_slots is not False and context.info.defrag and not heals
