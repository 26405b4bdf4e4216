"""Find room for tokens, sequences and bytes: who goes first, and what can be had at all.

Who was used longest ago goes first, then the deepest, then the largest; never a branch point or
what a lease stands on. With pages they are paged out, without they are dropped.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pyllamakv.errors import KVCacheFull, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.cache.paging import Page
    from pyllamakv.cache.prefix import PrefixCache
    from pyllamakv.cache.prefix_lease import PrefixLease
    from pyllamakv.cache.tree import Node
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import KVStats


def cells(context: Context) -> KVStats | None:
    """Count the cells, or return None where tokens need none, or nothing can be seen."""
    try:
        stats = context.kv.stats
    except Unsupported:
        return None
    return stats if stats.size else None


def capacity(context: Context) -> int | None:
    """Return how many tokens a sequence may have, None where there is no limit."""
    found = cells(context)
    if found is None:
        return None
    return found.size // context.info.n_seq_max if context.streams else found.size


def victim(cache: PrefixCache, kept: Iterable[Node], *, frees_id: bool) -> Node | None:
    """Return the node whose sequence goes next, not one of ``kept`` nor on the way to a lease."""
    branches = cache.branches
    protected = {*kept, *(each for lease in cache.leases for each in lease.node.path)}
    return branches.tree.oldest(
        lambda node: node not in protected and branches.removable(node, frees_id=frees_id)
    )


def evict(cache: PrefixCache, node: Node, keep: int = 0) -> Sequence | None:
    """Page a node out, or drop it where there are no pages; its sequence with ``keep`` tokens."""
    kept = cache.branches.evict(node, keep)
    cache.counts["evicted" if cache.branches.pager is None else "paged_out"] += 1
    return kept


def droppable(cache: PrefixCache) -> Node | None:
    """Return the branch to part with next, resident or paged out; None when all must stay."""
    branches = cache.branches
    protected = {each for lease in cache.leases for each in lease.node.path}
    most = 0 if branches.sharing else 1

    def wanted(node: Node) -> bool:
        keeps = node.entry is not None or node.page is not None
        return keeps and not node.pins and len(node.children) <= most and node not in protected

    return branches.tree.oldest(wanted)


def make_ids(cache: PrefixCache, n: int, kept: Iterable[Node]) -> bool:
    """Make sequences vacant; False when there are too few to part with."""
    kept = list(kept)
    while cache.branches.vacant < n:
        node = victim(cache, kept, frees_id=True)
        if node is None:
            return False
        evict(cache, node)
    return True


def make_page_room(cache: PrefixCache, node: Node) -> bool:
    """Make room for the pages that a node needs; False when there is none."""
    above = node.path[:-1]
    pages: list[Page] = []
    while pages != (pages := cache.branches.missing(node)):
        wanted = sum(page.end - page.start for page in pages)
        short = shortage(cache, wanted, None)
        if short > 0 and short > cache.branches.reclaimable(above):
            return False
        if not make_ids(cache, 1 + (len(pages) > 1), above):
            return False
        # What goes for it may be what the pages began after: then there are more of them.
        if not _free(cache, wanted, None, above):
            return False
    return True


def shortage(cache: PrefixCache, n: int, lease: PrefixLease | None) -> int:
    """Return how many cells are missing for ``n`` more tokens and what other leases may decode."""
    stats = cells(cache.context)
    if stats is None or cache.context.streams:
        return 0
    promised = sum(each.promised for each in cache.leases if each is not lease)
    return n + promised - stats.free


def check_cells(cache: PrefixCache, n: int, node: Node, length: int) -> None:
    """Raise KVCacheFull unless ``n`` tokens can be placed after ``length`` tokens up to a node."""
    short = shortage(cache, n, None)
    if short <= 0:
        return
    kept = [each for each in node.path if each.end <= length]
    if short > cache.branches.reclaimable(kept, None if node in kept else (node, length)):
        raise full(cache, n)


def make_cells(cache: PrefixCache, n: int, lease: PrefixLease) -> None:
    """Make room for ``n`` more tokens of a lease, or raise KVCacheFull."""
    if cache.context.streams:
        longest = capacity(cache.context)
        if longest is not None and len(lease.sequence) + n > longest:
            raise full(cache, n)
        return
    short = shortage(cache, n, lease)
    if short > 0 and short > cache.branches.reclaimable(()):
        raise full(cache, n)
    if not _free(cache, n, lease, ()):
        raise full(cache, n)


def _free(cache: PrefixCache, n: int, lease: PrefixLease | None, kept: Iterable[Node]) -> bool:
    kept = list(kept)
    while shortage(cache, n, lease) > 0:
        node = victim(cache, kept, frees_id=False)
        if node is None:
            return False
        evict(cache, node)
    _gather(cache.context, n)
    return True


def _gather(context: Context, n: int) -> None:
    """Defragment where a micro-batch finds no hole that is large enough."""
    if context.info.contiguous_slots is False or not context.info.defrag:
        return
    stats = cells(context)
    if stats is not None and stats.largest_hole < min(n, stats.free):
        with suppress(Unsupported):
            context.kv.defrag()


def full(cache: PrefixCache, n: int) -> KVCacheFull:
    """Make the error for ``n`` tokens that find no room."""
    stats = cells(cache.context)
    size, used, hole = (stats.size, stats.used, stats.largest_hole) if stats else (0, 0, None)
    msg = (
        f"there is no room for {n} more tokens: {used} of {size} cells are used, by leases and "
        "what is pinned most of all; release a lease, or make the context with a larger n_ctx"
    )
    return KVCacheFull(
        msg, cells=size, used=used, largest_hole=hole, wanted=n, defragged=False, stats=stats
    )
