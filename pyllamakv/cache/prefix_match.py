"""Find the longest known beginning of a prompt, and get a sequence that has it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyllamakv.cache import eviction
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.radix_tree import TOKEN_BYTES
from pyllamakv.cache.residency import DamagedPage
from pyllamakv.errors import PagingError, PartialRemovalRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.residency import Residency
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime import sequence as runtime

LOG = logging.getLogger("pyllamakv.cache")


def fork_longest_prefix(
    cache: PrefixCache, key: bytes, groups: Sequence[Group], resumed: Node | None = None
) -> tuple[runtime.Sequence, int]:
    """Return a sequence with the longest prefix of a prompt, without its last token.

    ``resumed`` is the node of a parked lease, whose sequence may be taken over. Raises
    NoSlotAvailable, or KVCacheFull if the rest cannot fit; the cache is unchanged then.
    """
    exact = cache.branches.exact
    while True:
        node, length = _find(cache, key, groups, exact=exact)
        eviction.check_cells(cache, len(key) // TOKEN_BYTES - length, node, length)
        try:
            return _sequence(cache, key, length, resumed, exact=exact), length
        except PartialRemovalRefused:
            # The window has passed that position, also in a cache of full size, where llama.cpp
            # reuses cells outside of the window. Decoding can continue from the end of a branch.
            if exact:
                raise
            exact = True
            if cache.stored is not None and resumed is None:
                loaded = cache.stored.load(cache, key, groups, exact=True)
                cache.counts.add("loaded_tokens", loaded)


def _find(
    cache: PrefixCache, key: bytes, groups: Sequence[Group], *, exact: bool
) -> tuple[Node, int]:
    """Return the node in which the usable prefix ends, and the prefix's length.

    ``exact``: the prefix must end at a node that has an entry.
    """
    pages = True
    while True:
        node, length = _candidate(cache, key, groups, exact=exact, pages=pages)
        there = node.entry is not None or node.leases if exact else node.ref_count
        if not length or there:
            return node, length
        pages = _page_in(cache, node if exact else cache.branches.page_holder(node))


def _candidate(
    cache: PrefixCache, key: bytes, groups: Sequence[Group], *, exact: bool, pages: bool
) -> tuple[Node, int]:
    tree = cache.branches.tree
    node, length = tree.match(key)
    length = min(length, len(key) // TOKEN_BYTES - 1)  # one token is left to decode
    path = node.path
    if exact:
        for each in reversed(path):
            kept = each.entry is not None or each.leases or (pages and each.page is not None)
            if kept and each.end <= length and grouping.floor(groups, each.end) == each.end:
                return each, each.end
        return tree.root, 0
    if not pages:
        length = min(length, max((each.end for each in path if each.ref_count), default=0))
    length = grouping.floor(groups, length)
    return next((each for each in path if each.end >= length > each.start), tree.root), length


def _tail(branches: Residency, donor: runtime.Sequence, length: int) -> Node | None:
    """Return the node of a sequence that may be cut although something pinned depends on it."""
    node = next((each for each in branches.tree.entries if each.entry is donor), None)
    if node is None or not branches.removable(node, frees_id=False):
        return None
    heir = branches.heir(node)
    return node if heir is None or heir.end <= length else None


def _page_in(cache: PrefixCache, node: Node | None) -> bool:
    """Page a node in if cells are free; return whether that succeeded."""
    if node is None:
        return False
    try:
        if not eviction.make_page_room(cache, node):
            return False
        cache.branches.page_in(node)
    except DamagedPage as error:
        LOG.warning("%s; the branch is given up", error)
        cache.counts.add("damaged")
        cache.branches.discard(error.page)
        return False
    except PagingError as error:
        LOG.warning("%s", error)
        return False
    cache.counts.add("paged_in")
    return True


def _sequence(
    cache: PrefixCache, key: bytes, length: int, resumed: Node | None, *, exact: bool
) -> runtime.Sequence:
    """Return a sequence of the first tokens of a key: new, a fork, or one taken over.

    ``exact``: these are all tokens of a branch, and no longer one may be trimmed to them.
    """
    branches = cache.branches
    while True:
        # An eviction may merge nodes, so search the tree again.
        node, _ = branches.tree.match(key[: length * TOKEN_BYTES])
        if length and node.entry is not None and node.end == length:
            parked = node.parked - (node is resumed)
            unneeded = not node.pins and not parked and not node.children
            if branches.gives(node, unneeded=unneeded):
                if node is resumed or not branches.pages_first(node):
                    return branches.detach(node)
                taken = eviction.evict(cache, node, length)
                assert taken is not None
                return taken
        donor = branches.provider(node, exact=exact) if length else None
        if donor is None:
            eviction.make_start(cache)
        if branches.vacant:
            return branches.new() if donor is None else branches.fork(donor, length)
        kept = [each for each in node.path if each.end <= length]
        victim = eviction.victim(cache, kept, frees_id=True)
        if victim is None and donor is not None:
            victim = _tail(branches, donor, length)
        if victim is None:
            raise eviction.no_sequence_error(cache)
        heir = branches.heir(victim) if branches.storage(victim) is None else None
        if victim.entry is donor and donor is not None and (heir is None or heir.end <= length):
            taken = eviction.evict(cache, victim, length)
            assert taken is not None
            return taken
        eviction.evict(cache, victim)
