"""Prefixes in a sliding-window cache of full size, which can lose cells outside of its window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, feed, serve

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import PartialRemovalRefused
from pyllamakv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return a context with windows of full size, all of which have passed."""
    fork = Sequence.fork

    def whole(self: Sequence, length: int | None = None) -> Sequence:
        if length is not None and 0 < length < len(self):
            raise PartialRemovalRefused("the window has passed")
        return fork(self, length)

    monkeypatch.setattr(Sequence, "fork", kit.ours(whole))
    ctx = kit.context(tmp_path, {"partial": False}, n_ctx=256, n_seq_max=5, swa_full=True)
    object.__setattr__(ctx.info, "memory", MemoryType.SWA)
    object.__setattr__(ctx.info, "can_remove_partly", True)
    return ctx


def test_a_lost_prefix_is_decoded_again(passed: Context) -> None:
    """The longest branch that the prompt continues is reused; a part of one is not."""
    cache = PrefixCache(passed)
    assert serve(cache, [*SYSTEM, 1, 2]) == 0
    assert serve(cache, [*SYSTEM, 3, 4]) == 0
    assert serve(cache, [*SYSTEM, 1, 2, 5]) == 22


@pytest.mark.regression(
    "a branch that could not be cut was counted as two evictions",
    by="differential",
    of="Python",
)
def test_an_eviction_that_the_memory_refuses_is_not_counted(
    passed: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the only sequence for a prompt, which fails: the branch is then dropped as a whole."""
    trim = Sequence.trim

    def whole(self: Sequence, length: int) -> None:
        if 0 < length < len(self):
            raise PartialRemovalRefused("the window has passed")
        trim(self, length)

    monkeypatch.setattr(Sequence, "trim", kit.ours(whole))
    cache = PrefixCache(passed, entries=1, paging=0)
    serve(cache, [*SYSTEM, 1, 2])
    assert serve(cache, [*SYSTEM, 3]) == 0
    assert (cache.stats().evictions, cache.stats().evicted_tokens) == (1, 22)


@pytest.mark.regression(
    "a prompt failed if a window cache of full size had lost the window of its prefix",
    by="random_operations",
    of="Python",
)
def test_a_lease_at_the_end_of_a_prefix_is_forked(passed: Context) -> None:
    """A longer branch has its tokens, but not their window."""
    cache = PrefixCache(passed)
    with cache.acquire(SYSTEM) as lease:
        feed(lease)
        assert serve(cache, [*SYSTEM, 1, 2]) == 20
        with cache.acquire([*SYSTEM, 8]) as other:
            assert other.cached == 20
            feed(other)
    cache.check()


@pytest.mark.regression(
    "a prompt failed if a window cache of full size had lost the window of its prefix",
    by="random_operations",
    of="Python",
)
@pytest.mark.parametrize("drop", [PrefixCache.clear, PrefixCache.evict, PrefixCache.relieve])
def test_a_pinned_prefix_of_a_dropped_branch_is_lost(
    passed: Context, drop: Callable[[PrefixCache], object]
) -> None:
    """The pin is removed with it, because nothing can restore the prefix."""
    cache = PrefixCache(passed, paging=0)
    serve(cache, [*SYSTEM, 1, 2])
    cache.pin("system", SYSTEM)
    drop(cache)
    cache.check()
    assert not cache.pins
    assert serve(cache, [*SYSTEM, 3]) == 0


@pytest.mark.regression(
    "a pinned prefix was evicted with the page of a longer branch",
    by="random_operations",
    of="Python",
)
def test_a_page_with_a_pinned_prefix_is_not_evicted(tmp_path: Path) -> None:
    """Until another page or sequence has the prefix, or it is unpinned."""
    ctx = kit.context(tmp_path, n_ctx=256, n_seq_max=5, swa_full=True)
    object.__setattr__(ctx.info, "memory", MemoryType.SWA)
    cache = PrefixCache(ctx, paging="memory")
    serve(cache, [*SYSTEM, 1, 2])
    cache.page_out([*SYSTEM, 1, 2])
    cache.pin("system", SYSTEM)
    assert not cache.evict()
    cache.check()
    assert serve(cache, [*SYSTEM, 3]) == 20
    assert cache.evict()
    cache.check()
    assert serve(cache, [*SYSTEM, 4]) == 20
    cache.unpin("system")
    while cache.evict():
        cache.check()
    assert serve(cache, [*SYSTEM, 5]) == 0


@pytest.mark.regression(
    "the content of a pinned prefix was lost with the page of a parked lease",
    by="differential",
    of="Python",
)
@pytest.mark.parametrize("used", [True, False])
def test_the_page_of_a_parked_lease_stays_for_a_pinned_prefix(tmp_path: Path, used: bool) -> None:
    """Without paging, it is dropped when the pin is removed as well."""
    ctx = kit.context(tmp_path, n_ctx=256, n_seq_max=5, swa_full=True)
    object.__setattr__(ctx.info, "memory", MemoryType.SWA)
    cache = PrefixCache(ctx, entries=1, paging=0)
    lease = cache.acquire([*SYSTEM, 1, 2])
    feed(lease)
    cache.pin("system", SYSTEM)
    parked = lease.park()
    serve(cache, [7] * 9)
    assert cache.stats().paged == 1
    parked.close()
    cache.check()
    assert cache.cached_length([*SYSTEM, 3]) == 20
    if used:
        assert serve(cache, [*SYSTEM, 3]) == 20
    cache.unpin("system")
    cache.check()
    assert cache.stats().paged == 0


@pytest.mark.regression(
    "a prompt failed if a window cache of full size had lost the window of its prefix",
    by="random_operations",
    of="Python",
)
def test_stored_sequences_are_used_as_a_whole(passed: Context, tmp_path: Path) -> None:
    """Each end of a branch has its own state, also if a longer sequence has its tokens."""
    store = tmp_path / "store"
    with PrefixCache(passed, store=store) as cache:
        serve(cache, SYSTEM)
        cache.flush()
        serve(cache, [*SYSTEM, 1, 2])
    with PrefixCache(passed, store=store) as cache:
        assert serve(cache, [*SYSTEM[:9], 7]) == 0
        assert serve(cache, [*SYSTEM, 3]) == 20
        assert serve(cache, [*SYSTEM, 1, 2, 3]) == 22
