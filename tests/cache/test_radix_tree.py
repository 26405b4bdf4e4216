"""Test the prefix tree against sets of prefixes, and its invariants.

Names in parentheses are those of ollama's tests.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyllamakv.cache.radix_tree import (
    NO_SALT,
    Node,
    RadixTree,
    WholePageTree,
    common,
    key_to_tokens,
    tokens_to_key,
)
from pyllamakv.cache.tier import CountedPage

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Sheet(CountedPage):
    """A fake page."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end = start, end


def entered(tree: RadixTree, tokens: list[int]) -> Node:
    """Attach a page to a node, so that it is not merged."""
    node = tree.insert(tokens_to_key(tokens), NO_SALT)
    if node.entry is None:
        tree.attach(node, tuple(tokens))
    return node


def parted(tree: RadixTree, node: Node) -> None:
    """Remove the pages of a node."""
    tree.detach(node)
    tree.prune(node)
    tree.merge(node)


@given(WORDS, WORDS, st.integers(0, 3))
def test_common_prefix_length_agrees_with_counting(a: list[int], b: list[int], before: int) -> None:
    """Tokens are compared one by one, at any start of the second key."""
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    expected = min(len(a), len(b)) if expected is None else expected
    assert common(tokens_to_key(a), tokens_to_key([7] * before + b), 4 * before) == expected


def test_tokens_survive_conversion_to_a_key() -> None:
    """The largest token and no token are packed."""
    tokens = [0, 1, 255, 256, 65536, 2**31 - 1]
    assert key_to_tokens(tokens_to_key(tokens)) == tokens
    assert tokens_to_key([]) == b""


def test_empty_tree_matches_nothing() -> None:
    """FindBestMatch, empty."""
    tree = RadixTree()
    assert tree.match(tokens_to_key([1, 2]), NO_SALT) == (tree.root, 0)
    assert tree.match(b"", NO_SALT) == (tree.root, 0)


def test_match_ends_at_the_end_of_a_node() -> None:
    """Whole nodes match, and nodes below them (FindBestMatch, full edge)."""
    tree = RadixTree()
    node = entered(tree, [1, 2, 3])
    assert tree.match(tokens_to_key([1, 2, 3]), NO_SALT) == (node, 3)
    assert tree.match(tokens_to_key([1, 2, 3, 4]), NO_SALT) == (node, 3)


def test_match_ends_inside_a_node() -> None:
    """A part of a run matches (FindBestMatch, partial edge): 46 of 47 thousand tokens."""
    tree = RadixTree()
    long = list(range(47_000))
    node = entered(tree, long)
    assert tree.match(tokens_to_key([*long[:46_000], 5]), NO_SALT) == (node, 46_000)


def test_split_and_merged_node_is_unchanged() -> None:
    """Split/Merge round trip: key, entry and counts are unchanged."""
    tree = RadixTree()
    node = entered(tree, [1, 2, 3, 4, 5])
    key = node.key
    upper = tree.split(node, 2)
    assert (upper.start, upper.end, node.start, node.end) == (0, 2, 2, 5)
    assert (upper.key + node.run, node.key, upper.ref_count) == (key, key, 1)
    assert tree.merge(upper)
    assert (node.start, node.end, node.key, node.entry) == (0, 5, key, (1, 2, 3, 4, 5))
    tree.check()
    for at in (0, 5):
        with pytest.raises(ValueError, match="inside"):
            tree.split(node, at)


def test_repeated_branching_keeps_every_branch() -> None:
    """Branch at each length of one sequence (RepeatedBranching)."""
    tree = RadixTree()
    trunk = list(range(10, 30))
    nodes = [entered(tree, [*trunk[:i], 1, 2]) for i in range(1, 20)]
    tree.check()
    for i, node in enumerate(nodes, 1):
        assert tree.match(tokens_to_key([*trunk[:i], 1, 2, 3]), NO_SALT) == (node, i + 2)


def test_removed_branch_merges_its_parent_and_sibling() -> None:
    """Remove one of two branches (RemoveNode): their parent and the other are merged."""
    tree = RadixTree()
    a, b = entered(tree, [1, 2, 3]), entered(tree, [1, 2, 4])
    assert tree.nodes == 3
    parted(tree, a)
    assert (tree.nodes, b.start, b.end) == (1, 0, 3)
    tree.check()
    parted(tree, b)
    assert (tree.nodes, tree.tokens, tree.held_tokens) == (0, 0, 0)


def test_pinned_node_is_not_merged() -> None:
    """A pinned node is not merged with its only child (UserSnapshotResistsAutoMerge)."""
    tree = RadixTree()
    pinned = tree.insert(tokens_to_key([1, 2]), NO_SALT)
    pinned.pins.add("system")
    leaf = entered(tree, [1, 2, 3])
    assert not tree.merge(pinned)
    tree.check()
    parted(tree, leaf)
    assert tree.match(tokens_to_key([1, 2]), NO_SALT) == (pinned, 2)


def test_eviction_order_is_age_then_depth_then_size() -> None:
    """Leaves have equal and different times of use."""
    tree = RadixTree()
    for tokens in ([1], [2, 2], [3, 3], [3, 4, 4], [3, 4, 5], [6, 6, 6]):
        entered(tree, tokens)
    order = []
    tree.touch(tree.match(tokens_to_key([1]), NO_SALT)[0])
    while (node := tree.evict_first(lambda node: not node.children)) is not None:
        order.append(key_to_tokens(node.key))
        parted(tree, node)
    assert order[-1] == [1]
    assert order[0] == [6, 6, 6]  # three levels, and all are evicted
    assert sorted(order[1:3]) == [[3, 4, 4], [3, 4, 5]]


def test_eviction_visits_few_nodes() -> None:
    """Neither nodes that are evicted later, nor former places of used ones, are visited."""
    tree = RadixTree()
    draw = Random(1)
    nodes = [entered(tree, [number, *range(draw.randint(1, 9))]) for number in range(1000)]
    for node in [*nodes, *draw.choices(nodes, k=3000)]:
        tree.touch(node)
    order = sorted(nodes, key=lambda node: node.rank)
    order[3].pins.add("system")
    looks = 0

    def wanted(node: Node) -> bool:
        nonlocal looks
        looks += 1
        return not node.pins

    evicted = []
    while (found := tree.evict_first(wanted)) is not None:
        evicted.append(found)
        parted(tree, found)
    assert evicted == [node for node in order if not node.pins]
    # Two per node: it and the next one, which may be equal. The pinned one is seen each time.
    assert looks < 3.5 * len(nodes)
    tree.check()


@pytest.mark.parametrize("make", [RadixTree, WholePageTree])
def test_first_evicted_node_agrees_with_a_full_search(make: type[RadixTree]) -> None:
    """The heap agrees with a search after sequences and pages were added, used and removed."""
    draw = Random(7)
    tree = make()
    for _ in range(600):
        key = tokens_to_key([draw.randrange(3) for _ in range(draw.randint(1, 7))])
        node = tree.insert(key, NO_SALT)
        kind = draw.randrange(5)
        if kind < 2 and node.entry is None:
            tree.attach(node, "entry")
        elif kind == 2:
            tree.set_page(node, Sheet(node.start, node.end))
        elif kind == 3:
            tree.touch(node, again=draw.random() < 0.5)
        elif node.entry is not None:
            tree.detach(node)
        else:
            tree.set_page(node, None)
        path = node.path
        tree.prune(node)
        for each in path:
            tree.merge(each)
        tree.check()
        for entries in (False, True):
            kept = [each for each in tree.walk() if each.entry or (each.page and not entries)]
            expected = min(kept, key=lambda each: each.rank, default=None)
            assert tree.evict_first(lambda _: True, entries=entries) is expected


def test_equal_nodes_are_evicted_in_the_order_of_the_tree() -> None:
    """Branches that were created together have one rank; the last child is the first."""
    tree = RadixTree()
    for tokens in ([1, 2], [1, 3], [4, 5], [1, 6]):
        entered(tree, tokens)
    order = []
    while (node := tree.evict_first(lambda node: node.entry is not None)) is not None:
        rest = [each for each in tree.walk() if each.rank == node.rank]
        assert node is rest[0]
        order.append(key_to_tokens(node.key))
        parted(tree, node)
    assert sorted(order) == [[1, 2], [1, 3], [1, 6], [4, 5]]


def test_match_updates_only_the_used_nodes() -> None:
    """Use only a prefix (LRUOnlyUpdatesUsedNodes): nodes below it keep their age.

    Ollama updated all nodes below the match, so that leaves never aged.
    """
    tree = RadixTree()
    a, b = entered(tree, [1, 2, 3]), entered(tree, [1, 2, 4])
    tree.touch(a)
    tree.touch(b)
    middle = tree.match(tokens_to_key([1, 2]), NO_SALT)[0]
    tree.touch(middle)
    assert a.last_used < b.last_used < middle.last_used
    assert tree.evict_first(lambda node: not node.children) is a


def test_a_divided_page_is_counted_at_both_nodes() -> None:
    """Both nodes may use it, until neither needs it (SplitPreservesData)."""
    tree = RadixTree()
    node = tree.insert(tokens_to_key([1, 2, 3, 4]), NO_SALT)
    page = Sheet(0, 4)
    assert tree.set_page(node, page) is None
    upper = tree.split(node, 2)
    assert (upper.page, page.refs) == (page, 2)
    assert tree.merge(upper)
    assert (node.page, page.refs) == (page, 1)
    tree.check()
    assert tree.set_page(node, None) is page
    whole = WholePageTree()
    node = whole.insert(tokens_to_key([1, 2, 3, 4]), NO_SALT)
    whole.set_page(node, page)
    assert whole.split(node, 2).page is None


class Machine(RuleBasedStateMachine):
    """Compare a tree with the set of all prefixes of inserted keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.kept: dict[tuple[int, ...], Node] = {}

    @rule(tokens=WORDS)
    def keep(self, tokens: list[int]) -> None:
        """Add a sequence."""
        self.kept[tuple(tokens)] = entered(self.tree, tokens)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def part(self, data: st.DataObject) -> None:
        """Remove a sequence."""
        tokens = data.draw(st.sampled_from(sorted(self.kept)))
        parted(self.tree, self.kept.pop(tokens))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """Use a sequence."""
        tokens = data.draw(st.sampled_from(sorted(self.kept)))
        self.tree.touch(self.kept[tokens])

    @rule(tokens=WORDS)
    def look(self, tokens: list[int]) -> None:
        """Find the longest common prefix with any sequence."""
        known = {each[:i] for each in self.kept for i in range(len(each) + 1)} | {()}
        expected = max(i for i in range(len(tokens) + 1) if tuple(tokens[:i]) in known)
        node, length = self.tree.match(tokens_to_key(tokens), NO_SALT)
        assert length == expected
        assert node is self.tree.root or node.start < length <= node.end
        assert key_to_tokens(node.key)[:length] == tokens[:length]

    @invariant()
    def holds(self) -> None:
        """Check the tree, and that no sequence was lost."""
        self.tree.check()
        for tokens, node in self.kept.items():
            assert (tuple(key_to_tokens(node.key)), node.entry) == (tokens, tokens)
        prefixes = {each[:i] for each in self.kept for i in range(1, len(each) + 1)}
        assert self.tree.tokens == self.tree.held_tokens == len(prefixes)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachine.pytestmark = pytest.mark.slow


def test_whole_page_use_does_not_touch_its_parents() -> None:
    """States above it were not used; runs above a partial page were."""
    for whole in (True, False):
        tree = (WholePageTree if whole else RadixTree)()
        upper = tree.insert(tokens_to_key([1, 2]), NO_SALT)
        tree.attach(upper, "entry")
        tree.touch(tree.insert(tokens_to_key([1, 2, 3]), NO_SALT))
        assert upper.last_used == (0 if whole else 1)
