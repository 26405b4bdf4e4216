"""Check that a prefix cache, its tree, its pages and the context's cells agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.cache import eviction
from pyllamakv.cache.prefix_tree import pack

if TYPE_CHECKING:
    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.prefix_tree import Node


def check(cache: PrefixCache) -> None:
    """Raise AssertionError naming the invariant that does not hold; it is our bug."""
    cache.sync()
    branches = cache.branches
    tree = branches.tree
    tree.check()
    nodes = list(tree.walk())
    for node in nodes:
        _check_node(cache, node)
    sequences = list(branches.sequences())
    assert branches.taken == len(sequences), f"{len(sequences)} sequences, {branches.taken} counted"
    assert len({each.id for each in sequences}) == len(sequences), "a sequence is at two nodes"
    pages = {id(node.page): node.page for node in nodes if node.page is not None}
    size = sum(page.size for page in pages.values())
    assert branches.paged_bytes == size, f"pages of {size} bytes, {branches.paged_bytes} counted"
    pinned = {name: node for node in nodes for name in node.pins}
    assert pinned == cache.pins, f"pinned are {pinned}, not {cache.pins}"
    _check_cells(cache)


def _check_node(cache: PrefixCache, node: Node) -> None:
    branches, entry = cache.branches, node.entry
    if entry is not None:
        assert entry.open, f"the sequence of {node} was closed"
        assert pack(entry.ledger.tokens) == node.key, f"the sequence of {node} has other tokens"
        assert entry.positions == list(range(node.end)), f"the sequence of {node} has gaps"
        assert entry.pos_max == node.end - 1, f"the cache has not all of {node}"
    if branches.partial:
        assert not (node.held and node.page), f"{node} is resident and paged out"
    if branches.sharing:
        page = node.page
        there = node.held or (page and page.start <= node.start and node.end <= page.end)
        assert there, f"the tokens of {node} are nowhere"
    if not node.children:
        kept = entry is not None or node.leases or node.page is not None
        assert kept, f"{node} is a leaf that keeps nothing"


def _check_cells(cache: PrefixCache) -> None:
    branches, context = cache.branches, cache.context
    stats = eviction.cells(context)
    if cache.leases or not branches.sharing or stats is None:
        return
    ours = {each.id for each in branches.sequences()}
    if {i for i, ledger in enumerate(context.ledgers) if len(ledger)} <= ours:
        held = branches.tree.held_tokens
        assert stats.used == held, f"{held} tokens are held and {stats.used} cells are used"
