"""Test that prompts with different salts share nothing, in every kind of memory and tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, feed, make

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.eviction_policy import AdaptiveReplacement
from pyllamakv.cache.interface import salt_digest
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.prefix_store import PrefixStore
from pyllamakv.cache.radix_tree import NO_SALT, RadixTree, tokens_to_key
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

A, B = salt_digest("a"), salt_digest("b")
OTHER: tuple[str | None, ...] = (None, "b")
KEY = tokens_to_key([1, 2, 3, 4])


def cached(cache: PrefixCache, salt: str | None, prompt: list[int] | None = None) -> int:
    """Serve a prompt, and return how much of it was cached."""
    with cache.acquire(prompt or [*SYSTEM, 1], salt=salt) as lease:
        feed(lease)
    cache.check()
    return lease.cached


def separate(cache: PrefixCache) -> None:
    """Check that each salt finds its own tokens, and no others'."""
    assert [cached(cache, salt) for salt in ("a", *OTHER)] == [0, 0, 0]
    assert [cached(cache, salt) for salt in ("a", *OTHER)] == [len(SYSTEM)] * 3


def recurrent(folder: Path) -> PrefixCache:
    """Create a cache of a memory with states."""
    ctx = kit.context(folder, {"partial": False}, n_ctx=256, n_seq_max=4)
    object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    return PrefixCache(ctx, checkpoints=CheckpointSchedule(size=100, interval=16, first=1))


@pytest.mark.parametrize("salt", ["", 1, b"a"])
def test_a_salt_is_text_that_is_not_empty(tmp_path: Path, salt: Any) -> None:
    """Any other value is refused before anything is leased or queued."""
    cache = make(tmp_path)
    for call in (cache.acquire, cache.page_out, cache.page_in, Batcher(cache).submit):
        with pytest.raises(UsageError, match="salt"):
            call([1, 2], salt=salt)
    with pytest.raises(UsageError, match="salt"):
        cache.pin("name", [1, 2], salt=salt)
    assert cache.stats().leased == 0
    # Text that UTF-8 cannot encode is a salt like others.
    assert cached(cache, "\ud800") == 0


def test_a_tree_keeps_keys_of_salts_apart() -> None:
    """Nodes of different salts are split, merged and removed separately."""
    tree = RadixTree()
    ends = {salt: tree.insert(KEY, salt) for salt in (NO_SALT, A, B)}
    assert tree.nodes == 3
    for salt, end in ends.items():
        assert tree.match(KEY, salt) == (end, 4)
        tree.attach(end, object())
    upper = tree.split(ends[A], 2)
    assert tree.match(KEY[:8], A) == (upper, 2)
    assert tree.match(KEY[:8], B) == (ends[B], 2)
    assert tree.match(KEY, salt_digest("c")) == (tree.root, 0)
    assert tree.merge(upper)
    tree.detach(ends[NO_SALT])
    tree.prune(ends[NO_SALT])
    assert tree.match(KEY, NO_SALT) == (tree.root, 0)
    tree.check()
    assert tree.nodes == 2


def test_digests_of_evicted_blocks_depend_on_the_salt() -> None:
    """Evictions of one salt change neither lists nor shares of another one."""
    policy = AdaptiveReplacement(block=2)
    policy.remember(KEY, A, 0, 10, frequent=False)
    share = policy.recent_share
    assert [policy.recall(KEY, salt, 0, 10) for salt in (NO_SALT, B)] == [0, 0]
    assert policy.recent_share == share
    assert policy.recall(KEY, A, 0, 10) == 4


@pytest.mark.parametrize("kind", ["cells", "state"])
def test_a_store_keeps_pages_of_salts_apart(tmp_path: Path, kind: Any) -> None:
    """They do after a restart; a removed page belongs to one salt."""
    store = PrefixStore(tmp_path / "store", {"model": "m"})
    pages = [store.add(kind, salt, None, 0, KEY, b"content") for salt in (A, B)]
    assert len({page.name for page in pages}) == 2
    assert b"salt" not in store.path(pages[0]).name.encode()
    store.close()
    store = PrefixStore(tmp_path / "store", {"model": "m"})
    for exact in (False, kind == "state"):
        assert store.find(KEY, NO_SALT, 4, exact=exact).length == 0
        for salt, page in zip((A, B), pages, strict=True):
            (found,) = store.find(KEY, salt, 4, exact=exact).pages
            assert found.name == page.name
    assert store.find(KEY, B, 3).length == 3
    store.discard(store.pages[pages[0].name])
    assert [store.find(KEY, salt, 4).length for salt in (A, B)] == [0, 4]
    store.close()


def test_salts_share_no_cells(tmp_path: Path) -> None:
    """Each keeps its own tokens, and is pinned separately."""
    cache = make(tmp_path)
    separate(cache)
    assert cache.stats().cells == 3 * (len(SYSTEM) + 1)
    assert cache.dump().count(" salt ") == 2
    with pytest.raises(UsageError, match="0 of 20"):
        cache.pin("system", SYSTEM, salt="c")
    cache.pin("system", SYSTEM, salt="a")
    cache.clear()
    assert [cached(cache, salt) for salt in ("a", *OTHER)] == [len(SYSTEM), 0, 0]


def test_salts_share_no_states(tmp_path: Path) -> None:
    """No state is saved at a position where another salt's prompt diverges."""
    cache = recurrent(tmp_path)
    separate(cache)
    cache = recurrent(tmp_path)
    with cache.acquire([*SYSTEM, 1], salt="a") as lease:
        assert lease.points is not None
        before = lease.limit_batch(100)
        with cache.acquire([*SYSTEM[:7], 2], salt="b"):
            assert lease.limit_batch(100) == before
        with cache.acquire([*SYSTEM[:7], 2], salt="a"):
            assert lease.limit_batch(100) == 7


@pytest.mark.parametrize("paging", ["memory", "files"])
def test_salts_share_no_pages(tmp_path: Path, paging: str) -> None:
    """A branch is paged out and in for its own salt."""
    where = "memory" if paging == "memory" else tmp_path / "pages"
    cache = make(tmp_path, paging=where)
    separate(cache)
    for salt in ("a", *OTHER):
        cache.page_out([*SYSTEM, 1], salt=salt)
    assert (cache.stats().cells, cache.stats().paged) == (0, 3)
    assert cached(cache, "c") == 0
    cache.page_in([*SYSTEM, 1], salt="b")
    assert (cache.stats().paged, cache.stats().paged_in) == (2, 1)
    assert [cached(cache, salt) for salt in ("a", *OTHER)] == [len(SYSTEM)] * 3


@pytest.mark.parametrize("states", [False, True])
def test_salts_share_no_stored_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: bool
) -> None:
    """They do after a restart, and after an eviction; the salt itself is in no file."""

    def start() -> PrefixCache:
        ctx = kit.context(tmp_path, {"partial": not states}, n_ctx=256, n_seq_max=4)
        if states:
            object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
        return PrefixCache(ctx, store=tmp_path / "store")

    cache = start()
    assert cached(cache, "a secret") == 0
    cache.clear()
    assert cached(cache, "b") == 0
    cache.close()
    for path in (tmp_path / "store").iterdir():
        assert b"a secret" not in path.read_bytes() + path.name.encode()
    cache = start()
    assert cached(cache, None) == 0
    assert [cached(cache, salt) for salt in ("a secret", "b")] == [len(SYSTEM)] * 2


def test_a_parked_lease_keeps_its_salt(tmp_path: Path) -> None:
    """Also one that has decoded nothing."""
    cache = make(tmp_path)
    for decoded in (0, 5):
        lease = cache.acquire(SYSTEM, salt="a")
        if decoded:
            lease.sequence.prefill(SYSTEM[:decoded])
        with lease.park().resume([*SYSTEM, 1]) as lease:
            feed(lease)
        assert cached(cache, "b", [*SYSTEM[: decoded + 1], 2]) == 0
        assert cached(cache, "a") == len(SYSTEM)
        cache.clear()


def test_a_batcher_reuses_prefixes_of_the_same_salt_only(tmp_path: Path) -> None:
    """Usage reports no tokens of other salts; a resumed generation keeps its salt."""
    cache = make(tmp_path)
    with Batcher(cache) as batcher:
        for salt, reused in (("a", 0), ("b", 0), (None, 0), ("a", 20), ("b", 20), (None, 20)):
            going = batcher.submit([*SYSTEM, 1], 2, salt=salt)
            batcher.run()
            assert going.usage.reused == reused
