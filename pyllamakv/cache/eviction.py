"""Evict branches of a prefix cache to make room for tokens, sequences and bytes.

The branch with the lowest priority (see `eviction_policy`) is evicted first, then the deepest, then
the largest; never a branch point or a node with a lease. A branch is paged out if the cache has a
pager, else dropped.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.defrag_retry import CellUsage
from pyllamakv.cache.residency import Windows
from pyllamakv.errors import (
    NativeError,
    NoSlotAvailable,
    PagingError,
    Unsupported,
    WorkerDied,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.cache.lease import PrefixLease
    from pyllamakv.cache.paging import Page
    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.errors import KVCacheFull
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import KVStats

LOG = logging.getLogger("pyllamakv.cache")

#: `Unsupported.reason` of a pin for tokens whose state was not kept.
LOST_STATE = "a state cannot go back"


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


def victim(cache: PrefixCache, kept: Iterable[Node], *, frees_id: bool) -> Node | None:
    """Return the node to evict next, excluding ``kept`` and ancestors of leased nodes.

    A state at a branch point is dropped last, because it serves several prompts.
    """
    branches = cache.branches
    protected = {*kept, *branches.leased(cache.leases)}
    found = [
        node
        for node in branches.tree.entries
        if node not in protected and branches.removable(node, frees_id=frees_id)
    ]
    ends = [node for node in found if len(node.children) < 2 or branches.storage(node) is not None]
    return branches.tree.evict_first(set(ends or found).__contains__, entries=True)


def evict(cache: PrefixCache, node: Node, keep: int = 0) -> Sequence | None:
    """Page a node out, or drop it without paging; its sequence keeps ``keep`` tokens."""
    branches = cache.branches
    if branches.storage(node) is not None:
        try:
            kept = branches.page_out(node, keep)
        except PagingError as error:
            if not branches.may_lose(node, error):
                raise
            LOG.warning("%s; the branch is dropped", error)
            node.unprotect()
        else:
            cache.counts.add("paged_out")
            return kept
    kept = branches.drop(node, keep)
    cache.counts.add("evictions")
    return kept


def free_sequences(cache: PrefixCache, n: int, kept: Iterable[Node]) -> bool:
    """Free sequences by eviction. Returns False if too few can be evicted."""
    kept = list(kept)
    idle = sum(node not in kept for node in cache.branches.tree.entries)
    if cache.branches.vacant + idle < n:
        return False
    while cache.branches.vacant < n:
        node = victim(cache, kept, frees_id=True)
        if node is None:
            return False
        evict(cache, node)
    return True


def make_start(cache: PrefixCache) -> None:
    """Empty the context if this release needs that before another sequence can start.

    Idle branches are paged out or dropped. Raises NoSlotAvailable with nothing changed if others
    must stay.
    """
    branches = cache.branches
    if branches.can_start:
        return
    entries = [node for node in branches.tree.walk() if node.entry is not None]
    if cache.leases or not all(branches.removable(node, frees_id=True) for node in entries):
        msg = (
            "this release starts no recurrent sequence in place of a removed one while others are "
            "leased or pinned: release leases, or use a later release"
        )
        raise NoSlotAvailable(msg, slots=branches.limit)
    for node in entries:
        evict(cache, node)


def keep_state(cache: PrefixCache, lease: PrefixLease) -> None:
    """Keep the present state of a lease in a vacant sequence, a page or the store.

    Evicts no branch. Failing to store the state is not an error.
    """
    branches, node = cache.branches, lease.node
    if node.parent is None or node.entry is not None or node.page is not None:
        return
    assert isinstance(branches, Windows), "only leases with points have states to keep"
    pager = branches.state_pager
    try:
        if pager is not None:
            page = branches.write_page(pager, lease.sequence.save(portable=False), 0, node.end)
            branches.tree.set_page(node, page)
            cache.counts.add("paged_out")
        elif branches.vacant:
            branches.attach(node, branches.fork(lease.sequence, len(lease.sequence)))
        elif cache.stored is not None:
            cache.counts.add("stored_tokens", cache.stored.keep(node.key, lease.sequence))
        branches.tree.touch(node)
    except WorkerDied:
        raise
    except (NativeError, Unsupported, PagingError, MemoryError) as error:
        LOG.warning("the state after %d tokens is not kept: %s", node.end, error)


def pin_state(cache: PrefixCache, node: Node, length: int) -> None:
    """Store the state of a lease at a node. Raises Unsupported if it is lost."""
    branches = cache.branches
    if length == node.end and node.page is not None:
        return
    if length < node.end or not node.leases:
        msg = f"this memory no longer has a state of {length} tokens: pin it while it is leased"
        raise Unsupported(msg, reason=LOST_STATE)
    if not free_sequences(cache, 1, node.path):
        raise no_sequence_error(cache)
    branches.attach(node, branches.fork(node.leases[0].sequence, length))


def no_sequence_error(cache: PrefixCache) -> NoSlotAvailable:
    """Create the error for a cache in which every sequence is in use."""
    limit = cache.branches.limit
    if cache.branches.starting:
        msg = (
            "this release starts no recurrent sequence after another one is removed, and a leased "
            "one has not started: decode its prompt first, or use a later release"
        )
    else:
        msg = (
            f"all {limit} sequences of this cache are leased or pinned; release "
            "a lease, or create the context with a larger n_seq_max"
        )
    return NoSlotAvailable(msg, slots=limit)


def make_page_room(cache: PrefixCache, node: Node) -> bool:
    """Free cells for the pages of a node; return False if that is impossible."""
    above = node.path[:-1]
    pages: list[Page] = []
    while pages != (pages := cache.branches.missing(node)):
        wanted = sum(page.end - page.start for page in pages)
        short = shortage(cache, wanted, None)
        if short > 0 and short > cache.branches.reclaimable(above):
            return False
        if not free_sequences(cache, 1 + (len(pages) > 1), above):
            return False
        # Evicting for this branch may drop the prefix that its pages follow; then it needs more
        # pages.
        held = next((each for each in reversed(above) if each.ref_count), None)
        if not _free(cache, wanted, None, above, shortage(cache, wanted, None), held):
            return False
    return True


def make_sequence_room(cache: PrefixCache, sequences: int, n: int, kept: Iterable[Node]) -> bool:
    """Free sequences, and cells for ``n`` tokens; return whether that succeeded.

    Evicts nothing if it is impossible. A branch below a pinned or shared one may count as immovable
    although it could be evicted.
    """
    kept, branches = list(kept), cache.branches
    protected = {*kept, *(each for lease in cache.leases for each in lease.node.path)}
    movable = (
        node
        for node in branches.tree.entries
        if node not in protected and branches.removable(node, frees_id=True)
    )
    if branches.vacant + sum(1 for _ in movable) < sequences:
        return False
    short = shortage(cache, n, None)
    if short > 0 and short > branches.reclaimable(kept):
        return False
    return free_sequences(cache, sequences, kept) and _free(
        cache, n, None, kept, shortage(cache, n, None)
    )


def certainly_fits(cache: PrefixCache, n: int, lease: PrefixLease | None) -> bool:
    """Return whether ``n`` more tokens certainly fit, without reading the cells."""
    context, branches = cache.context, cache.branches
    if context.stream_per_sequence or cache.max_sequence_tokens is None:
        return True
    most = None if _needs_holes(context) else branches.most_cells(cache.leases)
    if most is None:
        return False
    most += n + sum(each.promised for each in cache.leases if each is not lease)
    if most > cache.max_sequence_tokens:
        return False
    return branches.alone or most + branches.foreign() <= cache.max_sequence_tokens


def shortage(cache: PrefixCache, n: int, lease: PrefixLease | None) -> int:
    """Return the number of missing cells for ``n`` more tokens and those granted to other leases.

    If cells are missing, leases first lose the cells that they were granted in advance.
    """
    stats = None if cache.context.stream_per_sequence else cell_stats(cache.context)
    if stats is None:
        return 0
    others = [each for each in cache.leases if each is not lease]
    if n + sum(each.promised for each in others) > stats.free:
        for each in others:
            each.yield_room()
    return n + sum(each.promised for each in others) - stats.free


def check_cells(cache: PrefixCache, n: int, node: Node, length: int) -> None:
    """Raise KVCacheFull unless ``n`` tokens can be placed after ``length`` tokens up to a node."""
    if certainly_fits(cache, n, None):
        return
    short = shortage(cache, n, None)
    if short <= 0:
        return
    kept = [each for each in node.path if each.end <= length]
    if short > cache.branches.reclaimable(kept, None if node in kept else (node, length)):
        raise full(cache, n)


def make_cells(cache: PrefixCache, n: int, lease: PrefixLease) -> None:
    """Free cells for ``n`` more tokens of a lease, or raise KVCacheFull."""
    longest = cache.max_sequence_tokens
    if longest is not None and len(lease.ledger) + n > longest:
        raise full(cache, n)
    if certainly_fits(cache, n, lease):
        return
    short = shortage(cache, n, lease)
    if short > 0 and short > cache.branches.reclaimable(()):
        raise full(cache, n)
    if not _free(cache, n, lease, (), short):
        raise full(cache, n)


def _free(
    cache: PrefixCache,
    n: int,
    lease: PrefixLease | None,
    kept: Iterable[Node],
    short: int,
    head: Node | None = None,
) -> bool:
    """Evict until the cells suffice. Returns False if nothing is left to evict.

    If cells are shared, the tokens up to the end of ``head`` remain in the cache.
    """
    kept, context, branches = list(kept), cache.context, cache.branches
    while short > 0:
        node = victim(cache, kept, frees_id=False)
        if node is None:
            return False
        held = branches.tree.held_tokens
        if head is not None and branches.keeps_head(node, head):
            rest = evict(cache, node, head.end)
            assert rest is not None
            branches.attach(head, rest)
        else:
            evict(cache, node)
        # Reading the cells costs more than counting evicted tokens, so they are read once at the
        # end.
        freed = branches.freed(held)
        short -= freed or 0
        if freed is None or short <= 0:
            short = shortage(cache, n, lease)
    if _needs_holes(context):
        stats = cell_stats(context)
        if stats is not None and stats.largest_hole < min(n, stats.free):
            with suppress(Unsupported):
                context.kv.defrag()
    return True


def _needs_holes(context: Context) -> bool:
    """Return whether micro-batches need one hole that a decode does not create automatically."""
    heals = Capability.DEFRAG_OPTIONS in context.native.about.capabilities
    return context.info.contiguous_slots is not False and context.info.defrag and not heals


def full(cache: PrefixCache, n: int) -> KVCacheFull:
    """Create the error for ``n`` tokens without free cells."""
    there = CellUsage.of(cache.context, cell_stats(cache.context))
    msg = (
        f"no free cells for {n} more tokens: {there.used} of {there.cells} cells are used, mostly "
        "by leases and pinned branches; release a lease, or create the context with a larger "
        "n_ctx"
    )
    return there.full(msg, n)
