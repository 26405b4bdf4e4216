"""Store sequences at the nodes of a prefix tree, page them out and in, and drop them.

In a unified attention cache, sequences share the cells of common prefixes. The sequence at a leaf
therefore contains every node above it, and a page contains only tokens that no other branch has.
Other memory types store whole sequences, also in pages. Recurrent states cannot be rewound, so
decoding can only continue from the end of a branch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import prefix_states
from pyllamakv.cache.checkpoints import starts_after_clear
from pyllamakv.cache.paging import MemoryPager
from pyllamakv.cache.radix_tree import RadixTree, tokens_to_key
from pyllamakv.errors import (
    NativeError,
    PagingError,
    PartialRemovalRefused,
    Unsupported,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pyllamakv.cache.checkpoints import CheckpointSchedule
    from pyllamakv.cache.eviction_policy import EvictionPolicy
    from pyllamakv.cache.paging import Page, Pager
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

LOG = logging.getLogger("pyllamakv.cache")


class Branches:
    """The tree and its sequences, at most ``limit``.

    ``can_trim``: a sequence can be trimmed to any length. ``may_trim``: trimming may succeed, but a
    window may have passed. ``sharing``: pages and entries share common prefixes. If sequences
    cannot be trimmed, ``schedule`` limits the pages. Without a pager they are in host memory,
    unless ``before_drop`` stores branches elsewhere. ``policy`` ranks branches for eviction.
    """

    def __init__(
        self,
        context: Context,
        limit: int,
        pager: Pager | None,
        schedule: CheckpointSchedule,
        before_drop: Callable[[Node], None] | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.context, self.limit, self.schedule = context, limit, schedule
        #: Called with a node whose entry is about to be dropped, or parked outside of the cache.
        self._before_drop = before_drop
        memory = context.info.memory
        self.may_trim = memory in (MemoryType.ATTENTION, MemoryType.SWA)
        self.can_trim = self.may_trim and (
            memory is MemoryType.ATTENTION or context.params.swa_full
        )
        #: Whether pages are there for states only, so that a branch may be dropped instead.
        self.pages_optional = pager is None and before_drop is None and not self.can_trim
        if self.pages_optional and schedule.size and prefix_states.saves(context):
            pager = MemoryPager()
        self.pager = pager
        #: Pages of parked leases, if there is no pager.
        self._parking = MemoryPager()
        self.sharing = memory is MemoryType.ATTENTION and not context.stream_per_sequence
        #: Whether this release starts no recurrent sequence in place of a removed one.
        self._leaves = starts_after_clear(context)
        self._left = False
        self.tree = RadixTree(whole_pages=not self.sharing, policy=policy)
        self.taken = 0
        self.cell_bytes = _cell_bytes(context)
        #: Totals of tokens, as in `PrefixStats`.
        self.evicted_tokens = self.paged_out_tokens = self.paged_in_tokens = 0
        #: Bytes of a sequence that do not depend on its length: its states.
        self.state_bytes = 0

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
        return empty or not self._leaves or (self.vacant > 0 and not self._left)

    @property
    def starting(self) -> bool:
        """Return whether a leased sequence could not start any more if another one was removed."""
        return self._leaves and any(not len(lease.ledger) for lease in self.tree.root.leases)

    def new(self) -> Sequence:
        """Open an empty sequence."""
        if not self.may_trim and len(self.context.vacant) == self.context.info.n_seq_max:
            # Some releases cannot start a recurrent sequence in place of another one before a
            # clear.
            self.context.clear()
            self._left = False
        sequence = self.context.sequence()
        self.taken += 1
        return sequence

    def fork(self, donor: Sequence, length: int) -> Sequence:
        """Open a sequence that shares the first tokens of another one."""
        sequence = donor.fork(length)
        self.taken += 1
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Release a sequence."""
        sequence.close()
        self.taken -= 1
        self._left = True

    def provider(self, node: Node, beside: Node | None = None, *, exact: bool = False) -> Sequence:
        """Return a sequence with a node, but none at or below ``beside``; entries are preferred.

        If sequences cannot be trimmed, or with ``exact``, one that ends with the node comes first.
        """
        if (exact or not self.can_trim) and node.entry is None and node.leases:
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
        # Cached nodes need no page. The page of a state remains, because the sequence leaves it.
        for each in node.path if self.can_trim else ():
            self.forget_page(each)

    def forget_page(self, node: Node) -> None:
        """Remove the page of a node, and drop it if no other node needs it."""
        unused = self.tree.set_page(node, None)
        if unused is not None:
            unused.drop()

    def keep(self, node: Node, sequence: Sequence) -> None:
        """Make a leased sequence the entry of a node, sharing as many cells as possible."""
        if self.sharing:
            self._share(node, sequence)
        self.attach(node, sequence)
        if not self.can_trim and not self.state_bytes:
            try:
                saved = len(sequence.save(portable=False))
            except (NativeError, Unsupported, MemoryError):
                saved = 0  # no more than an estimate: not worth losing a sequence for
            self.state_bytes = max(1, saved - len(sequence) * self.cell_bytes)
        # If sequences can be trimmed, the longer one contains the shorter ones.
        for above in node.path[:-1] if self.can_trim else ():
            if above.entry is not None:
                self.close(self.detach(above))

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

    def tidy(self, node: Node) -> None:
        """Remove unused nodes and merge unneeded ones, from a node upwards."""
        path = node.path
        self.tree.prune(node)
        for each in path:
            self.tree.merge(each)

    def storage(self, node: Node) -> Pager | None:
        """Return where a node is paged out to; None: it is dropped."""
        if self.pager is not None:
            return self.pager
        # The page of a parked branch may start at the end of this node, and needs its tokens.
        needed = self.sharing and any(not each.ref_count for each in node.children.values())
        return self._parking if needed or node.parked else None

    def unpark(self, node: Node) -> None:
        """Count a parked lease less. Without a pager, a page that was for it alone is dropped."""
        node.unpark()
        if self.pager is None and not (self.sharing or node.protected):
            self.forget_page(node)
        while self.pager is None and not node.children and node.bare and node.linked:
            above = node.parent
            self.forget_page(node)
            self.tree.prune(node)
            if above is None or above.parent is None:
                break
            node = above
        self.tidy(node)

    # Parting...

    def removable(self, node: Node, *, frees_id: bool) -> bool:
        """Return whether a node's sequence can be paged out, or dropped if there are no pages."""
        if node.entry is None or (self.can_trim and (node.leases or node.ref_count != 1)):
            return False
        if self.starting:
            return False
        if self.storage(node) is not None:
            return True
        if node.protected:
            return False
        heir = self.heir(node) if frees_id else None
        return heir is None or self.storage(heir) is not None

    def drop(self, node: Node, keep: int = 0) -> Sequence | None:
        """Drop the entry and page of a node; return its sequence with ``keep`` tokens, if any."""
        heir, kept = self.heir(node), None
        if node.entry is not None or node.page is not None:
            first = node.start if self.sharing else 0
            self.evicted_tokens += node.end - min(max(keep, first), node.end)
        if node.entry is not None:
            if self._before_drop is not None:
                self._before_drop(node)
            sequence: Sequence = node.entry
            if keep:
                sequence.trim(keep)
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
        self.forget_page(node)
        self.tidy(node)
        return kept

    def heir(self, node: Node) -> Node | None:
        """Return the node above that keeps the sequence of a dropped one, if it needs one."""
        parent = node.parent
        if not self.can_trim or node.entry is None or parent is None or parent.parent is None:
            return None
        needed = parent.protected or (self.sharing and len(parent.children) > 1)
        return parent if needed and parent.ref_count == 1 else None

    def only_page(self, node: Node) -> bool:
        """Return whether a pinned or parked node above has no content but this node's page."""
        if node.page is None or not self.tree.whole_pages:
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

    # Pages. If cells are shared, a page contains only the nodes that no other sequence uses. It is
    # read into a new sequence, which then shares the cells of the parents. Pages may overlap, and a
    # page can restore every node in it.

    def discard(self, page: Page) -> None:
        """Drop all nodes that cannot be restored without this page; none of them is leased."""
        top = next(node for node in self.tree.walk() if node.page is page)
        above = top.parent
        for each in list(top.walk())[::-1] if self.sharing else [top]:
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
        pager = self.storage(node)
        assert pager is not None
        if pager is self._parking and self._before_drop is not None:
            # A flush does not read pages, so their tokens are written before.
            self._before_drop(node)
        chain = [node]
        while self.sharing and (above := chain[-1].parent) is not None and above.ref_count == 1:
            if above.parent is None:
                break
            chain.append(above)
        start = chain[-1].start if self.sharing else 0
        page = self.write_page(pager, self._save(sequence, chain[-1], start), start, node.end)
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

    def write_page(self, pager: Pager, saved: bytes, start: int, end: int) -> Page:
        """Store a page. Raises StateTooLarge if it alone exceeds the budget of states."""
        if not self.can_trim and len(saved) > self.schedule.budget:
            msg = (
                f"a state of {end} tokens has {len(saved)} bytes and the budget of checkpoints is "
                f"{self.schedule.budget}; increase it, or decode the tokens again"
            )
            raise StateTooLarge(msg)
        page = pager.write(saved, start, end)
        self.paged_out_tokens += end - start
        return page

    def surplus(self) -> Node | None:
        """Return the least valuable state if there are more than the schedule allows."""
        pager, most = self.pager, self.schedule
        if self.can_trim or pager is None:
            return None
        if pager.count <= most.size and pager.size <= most.budget:
            return None

        def wanted(node: Node) -> bool:
            return node.page is not None and not node.protected

        spare = next((each for each in self.tree.walk() if wanted(each) and each.entry), None)
        return spare or prefix_states.least_valuable(
            self.tree,
            wanted,
            lambda node: node.page.size,
        )

    def size_of(self, node: Node) -> int:
        """Return the bytes of the entry and the page of a node."""
        page = node.page.size if node.page is not None else 0
        return page + (self.bytes_of(node.end) if node.entry is not None else 0)

    def _save(self, sequence: Sequence, top: Node, start: int) -> bytes:
        assert top.parent is not None
        beside = self.provider(top.parent, top) if start else None
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
        if not self.sharing:
            return [node.page]
        path = [each for each in node.path if not each.ref_count]
        pages: list[Page] = []
        low = node.end
        # Pages may overlap: starting at the end, use only what later pages do not contain.
        while low > path[0].start:
            at = next(each for each in path if each.start < low <= each.end)
            pages.insert(0, at.page)
            low = at.page.start
        return pages

    def page_in(self, node: Node) -> None:
        """Page a node and all above it in. Needs an empty sequence per page, at most two.

        Raises PagingError, or DamagedPage if a retry cannot succeed. Nothing is changed then.
        """
        pages = self.missing(node)
        covered = 0
        if self.sharing:
            first = next(each for each in node.path if not each.ref_count)
            covered = first.start
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
                sequence.share(self.provider(first.parent or node), 0, covered)
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
        if self.sharing:
            return self.tree.held_tokens * self.cell_bytes
        return sum(self.bytes_of(len(each)) for each in self.sequences())

    @property
    def paged_bytes(self) -> int:
        """Return the bytes of all pages."""
        return (self.pager or self._parking).size

    @property
    def paged(self) -> int:
        """Return the number of pages."""
        return (self.pager or self._parking).count

    def reclaimable(self, protected: Collection[Node], head: tuple[Node, int] | None = None) -> int:
        """Return how many cells would be free with everything removable gone but ``protected``.

        ``head`` is a node whose tokens up to a length stay as well.
        """
        tree = self.tree
        kept = set(protected)
        for node in tree.walk():
            leased = self.can_trim and node.leases
            if leased or (node.protected and self.storage(node) is None):
                kept.update(node.path)
        going = [node for node in tree.walk() if node not in kept]
        if self.sharing:
            found = sum(len(node) for node in going if node.ref_count)
            if head is not None and head[0].ref_count and head[0] in going:
                found -= head[1] - head[0].start
            return found
        ids = {node.entry.id for node in going if node.entry is not None}
        staying = [i for i in range(self.context.info.n_seq_max) if i not in ids]
        found = -head[1] if head is not None else 0
        for cells in self.context.kv.snapshot().streams:
            if not cells.swa:
                stay = np.logical_or.reduce([cells.has(i) for i in staying] or [~cells.used])
                found += int((cells.used & ~stay).sum())
        return max(0, found)


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
