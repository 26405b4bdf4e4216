"""Test each policy against its definition, on a tree and in a cache with leases."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import prefix_kit
import pytest
import runtime_kit as kit
from prefix_kit import make, serve

from pyllamakv.cache.allocation import Allocator
from pyllamakv.cache.eviction_policy import (
    DEFAULT,
    EvictionPolicy,
    EvictionPolicyName,
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    RecencyAndFrequency,
    attention_span,
)
from pyllamakv.cache.eviction_policy import make as make_policy
from pyllamakv.cache.radix_tree import Node, RadixTree, key_to_tokens, tokens_to_key
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)


def policy(name: EvictionPolicyName) -> EvictionPolicy:
    """Return a policy for a model whose attention costs as much as the rest at position 8."""
    if name == "gdsf":
        return GreedyDualSizeFrequency(8.0)
    return RecencyAndFrequency(4.0) if name == "lrfu" else make_policy(name, None)  # type: ignore[arg-type]


def add(tree: RadixTree, tokens: list[int]) -> Node:
    """Use tokens as a prompt does: at its beginning and at its end."""
    node, length = tree.match(tokens_to_key(tokens))
    if length:
        node = tree.insert(tokens_to_key(tokens[:length]))
        tree.touch(node, again=True)
    node = tree.insert(tokens_to_key(tokens))
    if node.entry is None:
        tree.attach(node, "entry")
    tree.touch(node)
    return node


def is_leaf(node: Node) -> bool:
    """Return whether a node has no children."""
    return not node.children


def first(tree: RadixTree) -> list[int]:
    """Return the tokens of the leaf that is evicted first, and evict it."""
    node = tree.evict_first(is_leaf)
    assert node is not None
    key = key_to_tokens(node.key)
    tree.detach(node)
    tree.prune(node)
    tree.check()
    return key


def test_a_frequent_prompt_stays_with_the_adaptive_policy_alone() -> None:
    """LRU evicts a prompt that was used three times before newer ones."""
    found = {}
    for name in POLICIES:
        tree = RadixTree(policy=make_policy(name))
        for _ in range(3):
            add(tree, [1, 1])
        add(tree, [2, 2])
        add(tree, [3, 3])
        found[name] = first(tree)
        later = iter(range(4, 60))
        while found[name] != [1, 1] and tree.match(tokens_to_key([1, 1]))[1]:
            number = next(later)  # ends if nothing ages
            add(tree, [number, number])
            first(tree)
    assert found == {"lru": [1, 1], "lfu": [2, 2], "lrfu": [2, 2], "gdsf": [2, 2]}


def test_cost_counts_for_gdsf_alone() -> None:
    """Tokens at high positions cost more attention, so that a long run is evicted later."""
    found = {}
    for name in POLICIES:
        tree = RadixTree(policy=policy(name))
        add(tree, [5] * 40)
        add(tree, [6] * 4)
        found[name] = len(first(tree))
    assert found["gdsf"] == 4
    assert found["lru"] == found["lrfu"] == 40


def test_gdsf_ranks_by_uses_cost_and_size() -> None:
    """Eight tokens from position 8: 1 each, and attention of 11.5 / 8 on average."""
    rank = GreedyDualSizeFrequency(8.0)
    rank.age = 3.0
    tree = RadixTree(policy=rank)
    add(tree, [1] * 8)
    node = add(tree, [*[1] * 8, *[2] * 8])
    add(tree, [*[1] * 8, *[3] * 8])
    assert (node.start, node.end, node.uses) == (8, 16, 1)
    assert node.priority == pytest.approx(3.0 + 1 * (1 + 11.5 / 8))
    assert node.parent is not None
    assert node.parent.uses == 3
    assert node.parent.priority == pytest.approx(3.0 + 3 * (1 + 3.5 / 8))


def test_lrfu_is_the_sum_of_its_uses() -> None:
    """Each use counts 2 ** -(age / half-life); the order of nodes is that of these sums."""
    tree = RadixTree(policy=RecencyAndFrequency(4.0))
    draw = Random(3)
    uses: dict[int, list[int]] = {n: [] for n in range(6)}
    nodes = {}
    for _ in range(60):
        number = draw.choice([0, 0, 0, 1, 1, 2, 3, 4, 5])
        if number in nodes:
            tree.touch(nodes[number], again=True)
        else:
            nodes[number] = tree.insert(tokens_to_key([number, number]))
            tree.attach(nodes[number], "entry")
            tree.touch(nodes[number])
        uses[number].append(tree.clock)
    total = {
        n: sum(2 ** (-(tree.clock - at) / 4.0) for at in times)
        for n, times in uses.items()
        if times
    }
    for n, node in nodes.items():
        assert 2 ** ((node.priority - tree.clock) / 4.0) == pytest.approx(total[n])
    assert tree.evict_first(is_leaf) is nodes[min(total, key=total.__getitem__)]


def test_lrfu_survives_a_long_pause() -> None:
    """Powers of large numbers do not overflow."""
    rank = RecencyAndFrequency(1e-3)
    node = Node(None, 0, b"")
    node.uses, node.priority = 2, 10.0
    assert rank.rank(node, 10**9, again=True) == 1e9
    node.priority = 1e9
    assert rank.rank(node, 5, again=True) == pytest.approx(1e9)
    assert math.isfinite(rank.rank(node, 5, again=False))


def test_the_end_of_a_text_is_not_another_use() -> None:
    """A prompt counts once for the tokens that it found, whatever it decodes then."""
    for name in POLICIES:
        tree = RadixTree(policy=policy(name))
        for _ in range(3):
            node = add(tree, [1, 2, 3])
        assert node.uses == 3
        leaf = add(tree, [1, 2, 3, 4])
        assert leaf is node or leaf.uses in (1, 4)


def test_a_merged_node_is_as_valuable_as_the_upper_one() -> None:
    """The system prompt of one remaining chat is not less popular than before."""
    for name in POLICIES:
        tree = RadixTree(policy=policy(name))
        for number in range(4):
            add(tree, [1, 1, 1, number + 2])
        upper = tree.match(tokens_to_key([1, 1, 1]))[0]
        uses, priority = upper.uses, upper.priority
        assert uses == 4
        for _ in range(3):
            first(tree)
        (left,) = tree.walk()
        assert (left.uses, left.priority) == (uses, priority)
        # A division keeps both.
        upper = tree.split(left, 2)
        assert (upper.uses, upper.priority) == (uses, priority)


def test_age_is_the_highest_evicted_priority() -> None:
    """It never falls, so that a new node is not evicted before one that was idle for long."""
    tree = RadixTree(policy=LeastFrequentlyUsed())
    for number in range(8):
        for _ in range(number + 1):
            add(tree, [number, number])
    ages = []
    while tree.nodes:
        first(tree)
        ages.append(tree.policy.age)
    assert ages == sorted(ages)
    assert ages[-1] == 8.0
    assert add(tree, [9]).priority == 9.0


def test_a_span_follows_from_the_model(tmp_path: Path) -> None:
    """Llama 2 with 7 billion parameters: about 26,000 tokens."""
    info = kit.context(tmp_path).model.info
    object.__setattr__(info, "n_params", 6_738_415_616)
    object.__setattr__(info, "n_layer", 32)
    object.__setattr__(info, "n_embd", 4096)
    assert attention_span(info) == pytest.approx(25_705, rel=1e-3)
    made = make_policy("gdsf", info)
    assert isinstance(made, GreedyDualSizeFrequency)
    assert made.span == attention_span(info)
    object.__setattr__(info, "n_layer", 0)
    object.__setattr__(info, "n_params", 0)
    assert attention_span(info) == 1.0


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    """Before anything is created."""
    with pytest.raises(UsageError, match="lru, lfu, lrfu, gdsf"):
        make(tmp_path, policy="fifo")
    assert make(tmp_path).policy == DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_random_traffic_evicts_no_leases_pins_or_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: EvictionPolicyName
) -> None:
    """Random operations with evictions; each is compared with all candidates by brute force."""
    evicted: list[bytes] = []
    chosen: list[Node] = []

    def look(cache: Allocator, node: Node, keep: int = 0) -> Any:
        protected = {each for lease in cache.leases for each in lease.node.path}
        assert node not in protected
        assert not node.pins or cache.branches.storage(node) is not None
        # Nothing is evicted while a child is still in the cache.
        assert all(not child.ref_count for child in node.children.values())
        chosen.append(node)
        evicted.append(node.key)
        return evict(cache, node, keep)

    def cheapest(tree: RadixTree, wanted: Any, **options: Any) -> Node | None:
        found = evict_first(tree, wanted, **options)
        rest = [each for each in tree.walk() if wanted(each)]
        assert (found is None) == (not rest)
        assert found is None or found.priority == min(each.priority for each in rest)
        return found

    evict, evict_first = Allocator.evict, RadixTree.evict_first
    monkeypatch.setattr(Allocator, "evict", kit.ours(look))
    monkeypatch.setattr(RadixTree, "evict_first", kit.ours(cheapest))
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        evicted.clear()
        context = kit.context(folder, n_ctx=96, n_seq_max=5)
        traffic = prefix_kit.Traffic(context, 11, policy=name)
        traffic.run(120)
        runs.append(list(evicted))
        assert len(runs[-1]) > 10
    assert runs[0] == runs[1]


def test_frequent_prompt_is_not_evicted_by_a_scan(tmp_path: Path) -> None:
    """Prompts used once evict a frequent prompt only with LRU."""
    found = {}
    for name in POLICIES:
        folder = tmp_path / name
        folder.mkdir()
        cache = make(folder, n_ctx=64, n_seq_max=8, policy=name, paging=0)
        often = [7] * 20
        for _ in range(6):
            serve(cache, often)
        for number in range(3):
            serve(cache, [20 + number] * 20)
        found[name] = serve(cache, often)
    assert found == {"lru": 0, "adaptive": 19}


@pytest.mark.parametrize("limit", ["cells", "budget"])
def test_the_end_of_a_branch_is_evicted_before_its_beginning(tmp_path: Path, limit: str) -> None:
    """As many whole blocks as needed are evicted; LRU evicts the whole branch."""
    found = {}
    for name in POLICIES:
        folder = tmp_path / name
        folder.mkdir()
        cache = make(folder, n_ctx=512 if limit == "budget" else 6 * BLOCK, n_seq_max=4,
                     policy=name, paging=0)  # fmt: skip
        if limit == "budget":
            cache.budget = cache.branches.bytes_of(6 * BLOCK)
        long = [1 + n % 50 for n in range(5 * BLOCK)]
        serve(cache, long)
        serve(cache, [60] * (BLOCK + 20))
        cache.check()
        assert cache.stats().evictions == 1
        assert cache.stats().evicted_tokens == (5 if name == "lru" else 1) * BLOCK
        assert (cache.stats().digest_bytes > 0) == (name == "adaptive")
        found[name] = serve(cache, long)
        cache.check()
    assert found == {"lru": 0, "adaptive": 4 * BLOCK}
