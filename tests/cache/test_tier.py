"""Test the tiers that store pages: memory, files, and damaged files."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import SimulatedNative
from prefix_kit import SYSTEM, make, serve

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import tier
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import NativeError, PagingError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

SAVED = bytes(range(256)) * 8


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_pages_return_the_written_bytes(where: str, tmp_path: Path) -> None:
    """Write, read and drop, and count the bytes."""
    target = tier.page_tier("memory" if where == "memory" else tmp_path / "new" / "pages")
    assert target is not None
    a, b = target.write(SAVED, 3, 9), target.write(SAVED[:10], 0, 2)
    assert (a.read(), b.read()) == (SAVED, SAVED[:10])
    assert (a.start, a.end, a.refs) == (3, 9, 0)
    assert (target.count, target.size) == (2, a.size + b.size)
    assert a.size >= len(SAVED)
    a.drop()
    assert (target.count, target.size) == (1, b.size)
    target.close()
    b.drop()
    assert (target.count, target.size) == (0, 0)
    assert list(tmp_path.rglob("*.kvpage")) == []


def test_the_pages_of_an_unclosed_cache_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are with the last reference, but not by a forked child."""
    kept, gone = tier.FileTier(tmp_path), tier.FileTier(tmp_path)
    for each in (kept, gone):
        each.write(SAVED, 0, 2)
    there = kept.folder
    del gone, each
    assert list(tmp_path.iterdir()) == [there]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    kept.close()
    assert list(tmp_path.iterdir()) == [there]


def test_cache_without_a_directory_has_no_tier() -> None:
    """Without a directory, there is no tier."""
    assert tier.page_tier(None) is None
    numbers: list[Any] = [5, np.int64(5)]
    for number in numbers:
        assert tier.page_tier(number) is None
        assert tier.host_bytes(number, stored=True) == 5


def spoil(content: bytes, how: str) -> bytes:
    """Damage the bytes of a page."""
    if how == "truncated":
        return content[:-7]
    if how == "longer":
        return content + b"x"
    if how == "flipped":
        return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    return {"foreign": b"GGUF" + content[4:], "empty": b"", "head": content[:10]}[how]


@pytest.mark.parametrize("how", ["truncated", "longer", "flipped", "foreign", "empty", "head"])
def test_damaged_page_file_is_refused(how: str, tmp_path: Path) -> None:
    """The error names a file that was cut, changed, or is foreign."""
    target = tier.FileTier(tmp_path)
    page = target.write(SAVED, 0, 4)
    (path,) = target.folder.iterdir()
    path.write_bytes(spoil(path.read_bytes(), how))
    with pytest.raises(PagingError, match="cannot be used") as caught:
        page.read()
    assert caught.value.path == path


def test_a_page_of_another_branch_or_cache_is_refused(tmp_path: Path) -> None:
    """A valid page in the place of another one, and a removed page, are refused."""
    target, other = tier.FileTier(tmp_path), tier.FileTier(tmp_path)
    mine, next_, theirs = (
        target.write(SAVED, 0, 4),
        target.write(SAVED, 4, 8),
        other.write(b"", 0, 4),
    )
    for foreign in (next_, theirs):
        mine.path.write_bytes(foreign.path.read_bytes())  # type: ignore[attr-defined]
        with pytest.raises(PagingError, match="belongs to another"):
            mine.read()
    mine.path.unlink()  # type: ignore[attr-defined]
    with pytest.raises(PagingError, match="cannot be read"):
        mine.read()
    mine.drop()
    assert target.count == 1


def test_full_disk_leaves_no_partial_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves no file and no bytes counted, and the next one works."""
    target = tier.FileTier(tmp_path)
    real = type(tmp_path).open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "open", lambda self, mode: Full(real(self, mode)))
    with pytest.raises(PagingError, match="No space left") as caught:
        target.write(SAVED, 0, 4)
    assert caught.value.path is not None
    assert (target.count, target.size, list(target.folder.iterdir())) == (0, 0, [])
    monkeypatch.undo()
    assert target.write(SAVED, 0, 4).read() == SAVED


def test_file_as_page_directory_is_refused(tmp_path: Path) -> None:
    """The path of the directory is a file."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PagingError, match="writable directory"):
        tier.page_tier(tmp_path / "file")


PROMPTS = [[number] * 20 for number in range(3, 9)]


@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.SWA, MemoryType.HYBRID])
def test_evicted_branches_stay_in_host_memory_within_its_limit(
    tmp_path: Path, memory: MemoryType
) -> None:
    """By default, the limit holds all; a smaller one holds those that were used last."""
    ctx = kit.context(tmp_path, {"partial": memory is MemoryType.ATTENTION}, n_seq_max=1)
    object.__setattr__(ctx.info, "memory", memory)
    with PrefixCache(ctx) as cache:
        for prompt in PROMPTS:
            serve(cache, prompt)
        assert serve(cache, [*PROMPTS[0], 9]) == 20
        page = cache.stats().paged_bytes // cache.stats().paged
    for limit, reused in ((3 * page, (19, 20)), (page // 2, (0,)), (0, (0,))):
        if not limit and memory is not MemoryType.ATTENTION:
            continue  # states are in host memory without other pages
        with PrefixCache(ctx, paging=limit) as cache:
            for prompt in PROMPTS:
                serve(cache, prompt)
                assert cache.stats().bytes_by_tier["memory"] <= limit
            # Of a prompt, states may be kept before its last token only.
            assert serve(cache, [*PROMPTS[-2], 9]) in reused
            assert serve(cache, [*PROMPTS[0], 9]) == 0
    # With a store, what is evicted is there only, unless the cache names a limit.
    for paging in (None, 9 * page):
        with PrefixCache(ctx, store=tmp_path / f"{paging}", paging=paging) as cache:
            for prompt in PROMPTS[:3]:
                serve(cache, prompt)
            assert (cache.stats().paged > 0) == (paging is not None)
            assert serve(cache, [*PROMPTS[0], 9]) == 20
    # A store that is only read gets none of it.
    with PrefixCache(ctx, store=tmp_path / "None", store_read_only=True) as cache:
        for prompt in PROMPTS[4:]:
            serve(cache, prompt)
        assert serve(cache, [*PROMPTS[4], 9]) == 20


@pytest.mark.parametrize("paging", [0, 1000])
def test_a_branch_above_the_host_memory_loses_its_last_tokens_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paging: int
) -> None:
    """It is not saved in vain, and its first blocks stay, as without host memory."""
    cache = make(tmp_path, n_ctx=512, paging=paging)
    chat = [10 + i % 40 for i in range(400)]
    serve(cache, chat)
    monkeypatch.delattr(SimulatedNative, "state_save")
    serve(cache, [5] * 150)
    assert cache.cached_length([*chat, 9]) == 320


def test_pages_below_a_branch_above_the_host_memory_are_dropped_first(tmp_path: Path) -> None:
    """They need its tokens, which may not be paged out; an explicit request is refused."""
    cache = make(tmp_path, n_ctx=512, paging=30_000)
    prefix = [10 + i % 40 for i in range(300)]
    for number in (1, 2):
        serve(cache, [*prefix, *[number] * 10])
    cache.page_out([*prefix, *[2] * 10])
    with pytest.raises(PagingError, match="increase paging"):
        cache.page_out([*prefix, *[1] * 10])
    assert cache.cached_length([*prefix, *[1] * 10, 9]) == 310
    serve(cache, [5] * 250)
    assert cache.cached_length([*prefix, 9]) == 256
    assert cache.stats().paged == 0


def test_a_pinned_branch_is_paged_out_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence stays while others suffice, also if the library cannot save them."""
    for saves in (True, False):
        cache = make(tmp_path, n_ctx=256)
        pinned, other = [10 + i % 40 for i in range(100)], [6] * 60
        for prompt in (pinned, other):
            serve(cache, prompt)
        cache.pin("system", pinned)
        serve(cache, other)
        with monkeypatch.context() as patch:
            if not saves:
                patch.setattr(SimulatedNative, "state_save", refuse)
            serve(cache, [5] * 150)
        assert cache.stats().resident == 2
        assert cache.cached_length([*pinned, 9]) == 100
        assert (cache.stats().paged == 1) == saves
        cache.close()


def refuse(*_: Any) -> bytes:
    """Fail as a library that cannot save a sequence."""
    raise NativeError("no")


def test_a_parked_branch_may_exceed_the_host_memory(tmp_path: Path) -> None:
    """It is not dropped: a resumed lease continues after all of its tokens."""
    cache = make(tmp_path, n_seq_max=1, paging=1000)
    lease = cache.acquire(PROMPTS[0])
    lease.prefill()
    parked = lease.park()
    serve(cache, PROMPTS[1])
    assert cache.stats().bytes_by_tier["memory"] > 1000
    with parked.resume([*PROMPTS[0], 9]) as lease:
        assert lease.cached == 20
    serve(cache, PROMPTS[1])
    assert cache.stats().bytes_by_tier["memory"] <= 1000


def test_pages_stay_within_the_host_memory_without_further_prompts(tmp_path: Path) -> None:
    """Each operation that adds a page, or ends the protection of one, drops what exceeds it."""
    cache = make(tmp_path, paging=40_000)
    for prompt in PROMPTS[:4]:
        serve(cache, prompt)
    for _ in range(4):
        assert cache.relieve()
        assert 0 < cache.stats().paged_bytes <= 40_000
        cache.check()
    cache.close()

    cache = make(tmp_path, n_seq_max=1, paging=1000)
    lease = cache.acquire(PROMPTS[0])
    lease.prefill()
    parked = lease.park()
    assert cache.relieve()
    assert cache.stats().paged_bytes > 1000
    parked.close()
    assert cache.stats().paged_bytes == 0
    cache.check()
    serve(cache, PROMPTS[1])
    for name in ("system", "other", "other"):
        cache.pin(name, PROMPTS[1])
    cache.page_out(PROMPTS[1])
    cache.unpin("system")
    assert cache.stats().paged_bytes > 1000
    cache.unpin("other")
    assert cache.stats().paged_bytes == 0
    cache.check()


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_an_invalid_limit_of_host_memory_is_refused(tmp_path: Path, number: Any) -> None:
    """It is a whole number of bytes."""
    with pytest.raises(UsageError, match="paging"):
        make(tmp_path, paging=number)


def test_a_page_restores_every_node_in_it(tmp_path: Path) -> None:
    """A page of 20 tokens restores its first 12 alone, which were pinned since."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)
    cache.pin("system", tokens[:12])
    cache.page_in(tokens[:12])
    cache.check()
    assert cache.stats().cells == 12
    assert serve(cache, [*tokens[:12], 5]) == 12
    assert serve(cache, [*tokens, 5]) == 20
    assert cache.stats().damaged == 0


def test_a_page_that_cannot_be_restored_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sequence remains, and the page is used later."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)

    def fail(*_: Any) -> int:
        raise NativeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedNative, "state_load", fail)
        with pytest.raises(PagingError):
            cache.page_in(tokens)
    cache.check()
    assert cache.stats().resident == 0
    assert len(cache.context.vacant) == cache.context.info.n_seq_max
    cache.page_in(tokens)
    assert serve(cache, [*tokens, 5]) == 20


def test_a_page_of_other_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages of one length were exchanged: neither is used for the other's tokens."""
    cache = make(tmp_path, paging="memory")
    prompts = [[number] * 20 for number in (7, 8)]
    for tokens in prompts:
        serve(cache, tokens)
        cache.page_out(tokens)
    pages = [node.page for node in cache.branches.tree.walk()]
    contents = [page.read() for page in pages]
    monkeypatch.setattr(tier.MemoryPage, "read", lambda page: contents[1 - pages.index(page)])
    for tokens in prompts:
        with pytest.raises(PagingError, match="other tokens"):
            cache.page_in(tokens)
        assert serve(cache, [*tokens, 5]) == 0


def test_a_branch_is_restored_from_its_page_and_that_of_its_prefix(tmp_path: Path) -> None:
    """The branch that was paged out first has no tokens of the prefix that another one had then."""
    cache = make(tmp_path, paging="memory")
    first, second = ([*SYSTEM, *[number] * 8] for number in (7, 8))
    for tokens in (first, second):
        serve(cache, tokens)
    for tokens in (first, second):
        cache.page_out(tokens)
    starts = sorted((node.page.start, node.end) for node in cache.branches.tree.walk())
    assert starts == [(0, 20), (0, 28), (20, 28)]
    cache.page_in(first)
    cache.check()
    assert serve(cache, [*first, 5]) == 28
    assert serve(cache, [*second, 5]) == 28
    assert cache.stats().damaged == 0


def test_a_damaged_page_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is decoded, and no later prompt reads the page again."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)

    def fail(page: tier.MemoryPage) -> bytes:
        raise PagingError(f"{page} is damaged")

    monkeypatch.setattr(tier.MemoryPage, "read", fail)
    for _ in range(2):
        with cache.acquire([*tokens, 5]) as lease:
            assert lease.cached == 0
            assert (cache.stats().damaged, cache.stats().paged) == (1, 0)
    cache.check()
