"""Test each policy against its definition, on a tree and in a cache with leases."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import pytest
import runtime_kit as kit
from prefix_kit import make, serve

from pyllamakv.cache import eviction_policy
from pyllamakv.cache.allocation import Allocator
from pyllamakv.cache.eviction_policy import (
    BLOCK,
    DEFAULT,
    DIGEST_BYTES,
    AdaptiveReplacement,
    EvictionPolicyName,
)
from pyllamakv.cache.eviction_policy import make as make_policy
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.radix_tree import (
    NO_SALT,
    Node,
    RadixTree,
    WholePageTree,
    key_to_tokens,
    tokens_to_key,
)
from pyllamakv.cache.residency import UnifiedCells
from pyllamakv.errors import KVCacheFull, NoSlotAvailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.lease import PrefixLease

POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)


def add(tree: RadixTree, tokens: list[int]) -> Node:
    """Use tokens like a prompt: at its beginning and at its end."""
    node, length = tree.match(tokens_to_key(tokens), NO_SALT)
    if length:
        node = tree.insert(tokens_to_key(tokens[:length]), NO_SALT)
        tree.touch(node, again=True)
    node = tree.insert(tokens_to_key(tokens), NO_SALT)
    if node.entry is None:
        tree.attach(node, "entry")
    tree.touch(node)
    for each in node.path:
        tree.merge(each)
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
    assert found == {"lru": [1, 1], "adaptive": [2, 2]}


def test_the_lists_share_the_cache() -> None:
    """Recent tokens are evicted while they exceed their share, else frequent ones, oldest first."""
    policy = AdaptiveReplacement(block=1)
    tree = RadixTree(policy=policy)
    for number in (1, 2, 1, 2, 3, 4):
        add(tree, [number])
    assert (tree.tokens, tree.frequent_tokens) == (4, 2)
    assert first(tree) == [1]  # half of the tokens are recent, which is within the share
    assert first(tree) == [3]
    policy.recent_share = 1.0
    assert first(tree) == [2]
    assert first(tree) == [4]


def test_an_evicted_block_that_returns_is_frequent_and_moves_the_share() -> None:
    """By one block of the capacity, or by the ratio of the lists of digests."""
    policy = AdaptiveReplacement(block=1)
    tree = RadixTree(policy=policy)
    for number in (1, 1, *range(2, 11)):
        add(tree, [number])
    assert [first(tree) for _ in range(3)] == [[2], [3], [4]]
    policy.recent_share = 1.0
    assert first(tree) == [1]
    policy.recent_share = 0.5
    assert [len(each) for each in policy.evicted] == [3, 1]
    assert add(tree, [2]).frequent
    assert policy.recent_share == pytest.approx(0.5 + 1 / 10)
    assert add(tree, [1]).frequent
    assert policy.recent_share == pytest.approx(0.6 - 2 / 1 / 10)
    assert not add(tree, [11]).frequent
    assert [len(each) for each in policy.evicted] == [2, 0]


def test_a_digest_depends_on_all_tokens_before() -> None:
    """A block after another beginning is another block; tokens after a known block are new."""
    policy = AdaptiveReplacement(block=2)
    policy.remember(tokens_to_key([1, 2, 3, 4, 5]), NO_SALT, 0, 10, frequent=False)
    assert [len(each) for each in policy.evicted] == [2, 0]
    assert policy.recall(tokens_to_key([9, 9, 3, 4]), NO_SALT, 0, 10) == 0
    assert policy.recall(tokens_to_key([1, 2, 3, 4, 6, 7]), NO_SALT, 0, 10) == 4
    policy.remember(tokens_to_key([1, 2, 3, 4]), NO_SALT, 3, 10, frequent=True)
    assert policy.recall(tokens_to_key([1, 2, 3, 4]), NO_SALT, 0, 10) == 4
    tree = RadixTree(policy=policy)
    policy.remember(tokens_to_key([1, 2, 3, 4]), NO_SALT, 0, 10, frequent=True)
    assert add(tree, [1, 2, 3, 4, 5, 6]).start == 4
    assert tree.frequent_tokens == 4
    tree.check()


def test_the_bytes_of_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four digests per block of the cache, up to a maximum."""
    policy = AdaptiveReplacement(block=1)
    for number in range(100):
        policy.remember(tokens_to_key([number]), NO_SALT, 0, 10, frequent=number % 3 == 0)
    assert policy.digest_bytes == 40 * DIGEST_BYTES
    # The oldest of each list were removed.
    assert policy.recall(tokens_to_key([50]), NO_SALT, 0, 10) == 0
    assert policy.recall(tokens_to_key([98]), NO_SALT, 0, 10) == 1
    monkeypatch.setattr(eviction_policy, "MAX_DIGESTS", 7)
    policy.remember(tokens_to_key([1]), NO_SALT, 0, 10, frequent=False)
    assert policy.digest_bytes == 7 * DIGEST_BYTES
    assert make_policy("lru").digest_bytes == 0


@pytest.mark.parametrize("kind", [RadixTree, WholePageTree])
def test_random_traffic_keeps_the_lists_consistent(kind: type[RadixTree]) -> None:
    """By brute force, every choice is the oldest leaf of the list that exceeds its share."""
    draw = Random(3)
    policy = AdaptiveReplacement(block=2)
    tree = kind(policy)
    recalled = 0
    for _ in range(300):
        before = policy.recent_share
        add(tree, [draw.choice([1, 1, 1, 2, 3]) for _ in range(draw.randint(1, 9))])
        recalled += policy.recent_share != before
        while tree.tokens > 60:
            leaves = [each for each in tree.walk() if not each.children]
            recent = sum(len(each) for each in tree.walk() if not each.frequent)
            from_frequent = recent <= policy.recent_share * tree.tokens
            wanted = [each for each in leaves if each.frequent == from_frequent] or leaves
            found = tree.evict_first(is_leaf)
            assert found is not None
            assert found.rank == min(each.rank for each in wanted)
            tree.detach(found)
            tree.prune(found)
        tree.check()
        assert not set(policy.evicted[0]) & set(policy.evicted[1])
        assert 0 <= policy.recent_share <= 1
    assert recalled > 10


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    """It is before anything is created."""
    with pytest.raises(UsageError, match="lru, adaptive"):
        make(tmp_path, policy="fifo")
    assert make(tmp_path).policy == DEFAULT


def play(cache: PrefixCache) -> None:
    """Serve random prompts, of which up to three are in use at once; two prefixes are pinned."""
    draw, past = Random(11), [[3, 4, 5]]
    leases: list[PrefixLease] = []
    for number in range(120):
        base = draw.choice(past)
        prompt = [*base[: draw.randint(0, len(base))], *draw.choices(range(3, 10), k=20)]
        with suppress(KVCacheFull, NoSlotAvailable):
            lease = cache.acquire(prompt)
            leases.append(lease)
            lease.prefill()
            past.append(prompt)
        if number % 40 == 20:
            with suppress(UsageError):
                cache.pin(draw.choice("ab"), past[-1][:10])
        while len(leases) > draw.randint(0, 3):
            leases.pop(draw.randrange(len(leases))).release()
        cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_random_traffic_evicts_no_leases_pins_or_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: EvictionPolicyName
) -> None:
    """Random operations with evictions; each is compared with all candidates by brute force."""
    evicted: list[bytes] = []

    def look(cache: Allocator, node: Node, *more: Any, **options: Any) -> Any:
        protected = {each for lease in cache.leases for each in lease.node.path}
        assert node not in protected
        assert not node.pins or cache.branches.storage(node) is not None
        # Nothing is evicted while a child is still in the cache.
        assert all(not child.ref_count for child in node.children.values())
        evicted.append(node.key)
        return evict(cache, node, *more, **options)

    def look_at_tail(branches: UnifiedCells, node: Node, tokens: int) -> None:
        assert not node.leases
        assert not node.protected
        assert all(not child.ref_count for child in node.children.values())
        evicted.append(node.key)
        drop_tail(branches, node, tokens)

    def cheapest(tree: RadixTree, wanted: Any, **options: Any) -> Node | None:
        preferred = tree.policy.frequent_first(tree.tokens, tree.frequent_tokens)
        found = evict_first(tree, wanted, **options)
        rest = [each for each in tree.walk() if wanted(each)]
        rest = [each for each in rest if each.frequent == preferred] or rest
        assert (found is None) == (not rest)
        assert found is None or found.priority == min(each.priority for each in rest)
        return found

    evict, drop_tail = Allocator.evict, UnifiedCells.drop_tail
    evict_first = RadixTree.evict_first
    monkeypatch.setattr(Allocator, "evict", kit.ours(look))
    monkeypatch.setattr(UnifiedCells, "drop_tail", kit.ours(look_at_tail))
    monkeypatch.setattr(RadixTree, "evict_first", kit.ours(cheapest))
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        evicted.clear()
        context = kit.context(folder, n_ctx=96, n_seq_max=5)
        play(PrefixCache(context, policy=name))
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
        cache.check()
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
