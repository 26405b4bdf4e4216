"""Test evictions from a prefix cache: use, leases, pins, the budget.

Names in parentheses are those of ollama's tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import prefix_kit
import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, make, serve, used

from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.radix_tree import NO_SALT
from pyllamakv.errors import BudgetTooSmall, KVCacheFull, NoSlotAvailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path) -> PrefixCache:
    """Create a cache of 4 sequences and 128 cells."""
    return make(tmp_path)


# Evictions...
def test_least_recently_used_branch_is_evicted_first(tmp_path: Path) -> None:
    """Run out of sequences (LRUOnlyUpdatesUsedNodes): unused nodes below a match stay old.

    An earlier ollama marked all nodes below a match as used.
    """
    cache = make(tmp_path, n_seq_max=3, paging=0)
    a, b = [*SYSTEM, 1, 1], [*SYSTEM, 2, 2]
    serve(cache, a)
    serve(cache, b)
    serve(cache, [*SYSTEM, 3, 3])
    serve(cache, [*SYSTEM, 4, 4])  # a is evicted: its own tokens were not used
    assert serve(cache, [*b, 5]) == 22
    assert serve(cache, [*a, 5]) == 20
    assert cache.stats().evictions == 2


def test_active_conversations_are_never_evicted(tmp_path: Path) -> None:
    """Fill the cache beside a leased conversation (EvictionPreservesActiveConversations)."""
    cache = make(tmp_path, n_ctx=64)
    with cache.acquire([*SYSTEM, 1]) as lease:
        lease.prefill()
        for number in range(6):
            serve(cache, [100 + number] * 30)
        assert lease.sequence.tokens == [*SYSTEM, 1]
        lease.make_room(30)
        lease.sequence.prefill([2] * 30)
        with pytest.raises(KVCacheFull) as caught:
            lease.make_room(20)
        assert (caught.value.cells, caught.value.used, caught.value.wanted) == (64, 51, 20)
    cache.check()
    assert serve(cache, [*SYSTEM, 1, 2]) == 21


def test_a_branch_that_a_lease_continues_is_not_dropped(tmp_path: Path) -> None:
    """Its own sequence stays beside that of the lease, until the lease is released."""
    cache = make(tmp_path)
    serve(cache, SYSTEM)
    cache.pin("system", SYSTEM)
    lease = cache.acquire([*SYSTEM, 5])
    cache.unpin("system")
    assert not cache.evict()
    assert cache.stats().resident == 1
    lease.release()
    assert cache.evict()
    cache.check()


def test_a_released_lease_replaces_the_sequence_that_it_continues(cache: PrefixCache) -> None:
    """The longer sequence contains the tokens of the shorter one, which has no pin any more."""
    serve(cache, SYSTEM)
    cache.pin("system", SYSTEM)
    lease = cache.acquire([*SYSTEM, 5])
    cache.unpin("system")
    prefix_kit.feed(lease).release()
    assert [len(node.entry) for node in cache.branches.tree.entries] == [21]
    cache.check()


def test_the_prefix_of_a_prompt_is_not_evicted_for_it(tmp_path: Path) -> None:
    """Another branch is evicted, although it was used later."""
    cache = make(tmp_path, entries=2, paging="memory")
    serve(cache, SYSTEM)
    cache.pin("system", SYSTEM)
    serve(cache, [7] * 8)
    with cache.acquire([*SYSTEM, 5]) as lease:
        assert lease.cached == 20
        assert cache.pins["system"].entry is not None
        assert cache.stats().paged == 1
    cache.check()


def test_the_parked_prefix_of_a_prompt_is_not_evicted_for_it(tmp_path: Path) -> None:
    """Its sequence stays, although it was used before the other branch."""
    cache = make(tmp_path, entries=2, paging="memory")
    parked = prefix_kit.feed(cache.acquire(SYSTEM)).park()
    serve(cache, [7] * 8)
    with cache.acquire([*SYSTEM, 5]) as lease:
        assert lease.cached == 20
        assert [len(node.entry) for node in cache.branches.tree.entries] == [20]
    parked.close()
    cache.check()


def test_prompt_evicts_its_old_tail_when_cells_run_out(tmp_path: Path) -> None:
    """The prompt needs the cells of its own old tail, and of others."""
    cache = make(tmp_path, n_ctx=64)
    serve(cache, [5] * 60)
    assert serve(cache, [*([5] * 10), *([6] * 50)]) == 10
    assert used(cache) == 60
    serve(cache, [7] * 64)
    assert (used(cache), cache.stats().resident) == (64, 1)


def test_a_refused_resume_evicts_nothing(tmp_path: Path) -> None:
    """A branch was dropped whose sequence the prefix of the parked tokens keeps."""
    cache = make(tmp_path, n_seq_max=3, paging=0)
    lease = prefix_kit.feed(cache.acquire([1, 2, 3]))
    parked = lease.park()
    cache.allocator.evict(cache.branches.tree.match(lease.key, NO_SALT)[0])
    serve(cache, [1, 2, 7, 8])
    leases = [cache.acquire([9]), cache.acquire([10])]
    before = prefix_kit.leaves(cache)
    with pytest.raises(KVCacheFull):
        parked.resume([1, 2, 3, 4])
    assert prefix_kit.leaves(cache) == before
    leases[0].release()
    with parked.resume([1, 2, 3, 4]) as lease:
        assert lease.cached == 3
    leases[1].release()
    cache.check()


def test_nothing_is_evicted_for_sequences_that_pins_keep(tmp_path: Path) -> None:
    """Too few would be free."""
    cache = make(tmp_path, n_seq_max=3, paging=0)
    serve(cache, [1, 2, 3])
    serve(cache, [4, 5, 6])
    cache.pin("a", [1, 2, 3])
    with cache.acquire([9]):
        assert not cache.allocator.free_sequences(2, ())
        assert cache.stats().resident == 2
        assert cache.allocator.free_sequences(1, ())
        assert cache.stats().resident == 1
    cache.check()


def test_all_sequences_leased_is_an_error(tmp_path: Path) -> None:
    """Lease all sequences: ollama's multi-user choice used a slot that did not exist."""
    cache = make(tmp_path, n_seq_max=2)
    serve(cache, [1, 2, 3])
    leases = [cache.acquire([1, 2, 3, 4]), cache.acquire([9])]
    with pytest.raises(NoSlotAvailable) as caught:
        cache.acquire([1, 2])
    assert caught.value.slots == 2
    leases[0].prefill()
    leases[0].release()
    with cache.acquire([1, 2, 5]) as lease:
        assert lease.cached == 2
    leases[1].release()
    cache.check()


def test_prompt_without_free_cells_leaves_the_cache_unchanged(tmp_path: Path) -> None:
    """Request more cells than the leases leave free."""
    cache = make(tmp_path, n_ctx=64)
    serve(cache, [3] * 20)
    with cache.acquire([1] * 40) as lease:  # reserved, not decoded
        before = prefix_kit.leaves(cache)
        with pytest.raises(KVCacheFull):
            cache.acquire([3] * 30 + [2])
        assert prefix_kit.leaves(cache) == before
        cache.check()
        lease.prefill()
    cache.check()


def test_eviction_keeps_sequences_outside_the_cache(tmp_path: Path) -> None:
    """Use a sequence outside of the cache."""
    context = kit.context(tmp_path, n_ctx=64, n_seq_max=3)
    mine = context.sequence()
    mine.prefill([4] * 30)
    cache = PrefixCache(context)
    for number in range(5):
        serve(cache, [50 + number] * 25)
    assert mine.tokens == [4] * 30
    with pytest.raises(KVCacheFull):
        cache.acquire([9] * 40)
    cache.close()
    assert (context.kv.stats.used, len(mine)) == (30, 30)


# Pins...
def test_a_dropped_branch_leaves_its_pinned_prefix(cache: PrefixCache) -> None:
    """The prefix has no sequence of its own, and keeps that of the branch."""
    serve(cache, [*SYSTEM, 1, 2])
    cache.pin("system", SYSTEM)
    cache.clear()
    cache.check()
    assert [node.entry.tokens for node in cache.branches.tree.entries] == [SYSTEM]
    assert used(cache) == 20


def test_pinned_prefix_outlives_its_branches(tmp_path: Path) -> None:
    """Pin a system prompt (UserSnapshotPreservesRestorePoint) and evict everything else."""
    cache = make(tmp_path, n_ctx=64, n_seq_max=3, paging=0)
    serve(cache, [*SYSTEM, 1, 2])
    cache.pin("system", SYSTEM)
    cache.check()
    for number in range(6):
        serve(cache, [100 + number] * 30)
    cache.clear()
    cache.check()
    assert (used(cache), cache.stats().pinned) == (20, 1)
    assert "pinned system" in cache.dump()
    assert serve(cache, [*SYSTEM, 3]) == 20
    cache.unpin("system")
    cache.clear()
    assert (used(cache), cache.stats().nodes) == (0, 0)


def test_pins_require_cached_tokens_and_known_names(cache: PrefixCache) -> None:
    """Pin uncached tokens, pin twice under one name, and release an unknown pin."""
    serve(cache, SYSTEM)
    with pytest.raises(UsageError, match="20 of 21"):
        cache.pin("a", [*SYSTEM, 1])
    cache.pin("a", SYSTEM[:5])
    cache.pin("a", SYSTEM[:7])
    cache.check()
    assert cache.stats().nodes == 2
    with pytest.raises(UsageError, match="pinned are: a"):
        cache.unpin("b")
    cache.unpin("a")
    cache.check()
    assert cache.stats().nodes == 1


def test_pinned_sequences_are_not_taken(tmp_path: Path) -> None:
    """Pin as many prefixes as there are sequences."""
    cache = make(tmp_path, n_seq_max=2, paging=0)
    for number in (1, 2):
        serve(cache, [number] * 5)
        cache.pin(f"{number}", [number] * 5)
    with pytest.raises(NoSlotAvailable):
        cache.acquire([3])
    cache.check()
    cache.unpin("1")
    assert serve(cache, [3]) == 0
    assert serve(cache, [2, 2, 2]) == 2


# The budget...
def test_budget_limits_the_stored_branches(tmp_path: Path) -> None:
    """Serve more prompts than fit: ollama's trie grew without limit."""
    cache = make(tmp_path, n_seq_max=4)
    cache.budget = cache.branches.bytes_of(50)
    for number in range(8):
        serve(cache, [number] * 20)
        assert cache.stats().bytes <= cache.budget
    assert cache.stats().resident == 2
    assert serve(cache, [7] * 20) == 19
    with cache.acquire([9] * 20) as lease:
        lease.prefill()
        lease.make_room(40)
        lease.sequence.prefill([9] * 40)  # leased tokens are never truncated
    assert cache.stats().bytes == 0
    cache.check()


def test_a_budget_below_one_entry_is_refused(tmp_path: Path) -> None:
    """Request less than a token, and a prompt that is larger than the budget."""
    with pytest.raises(BudgetTooSmall) as caught:
        make(tmp_path, budget=10, paging=tmp_path / "pages")
    assert list((tmp_path / "pages").iterdir()) == []
    assert caught.value.needed > caught.value.budget == 10
    cache = make(tmp_path, budget=caught.value.needed * 10)
    serve(cache, [1] * 8)
    with pytest.raises(BudgetTooSmall):
        cache.acquire([2] * 11)
    assert serve(cache, [1] * 9) == 8
