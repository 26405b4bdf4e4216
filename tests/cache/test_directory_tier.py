"""Test a prefix cache with a store: restarts, evictions, invalid files."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import prefix_kit
import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, make, serve

from pyllamakv import errors
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import directory_tier, prefix_store
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.runtime import state_slices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LONG = [10 + i % 40 for i in range(600)]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., PrefixCache]:
    """Return a function that creates a cache with the store, in a new context."""

    def started(**options: Any) -> PrefixCache:
        return make(tmp_path, **{"n_ctx": 2048, "store": tmp_path / "store", **options})

    return started


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create states that cannot be cut."""

    def refuse(data: bytes) -> None:
        raise errors.StateError("not one attention cache")

    monkeypatch.setattr(state_slices, "read", refuse)


def kill(cache: PrefixCache) -> None:
    """End the use of a store like a killed process: nothing more is written."""
    assert cache.stored is not None
    cache.stored.store.close()


def full_disk(*_: Any) -> None:
    """Fail like a write on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_flushed_tokens_are_reused_after_a_restart(
    start: Callable[..., PrefixCache], tmp_path: Path
) -> None:
    """Exactly the flushed tokens are reused."""
    cache = start()
    serve(cache, [*LONG, 1, 2])
    serve(cache, [*LONG, 3])
    assert cache.flush() == len(LONG) + 3
    assert cache.flush() == 0
    serve(cache, [5] * 30)
    kill(cache)
    cache = start()
    for prompt, cached in (
        ([*LONG, 1, 2, 4], 602),
        ([*LONG, 3, 4], 601),
        ([*LONG[:300], 9], 300),
        ([5] * 31, 0),
    ):
        with cache.acquire(prompt) as lease:
            assert lease.cached == cached
            prefix_kit.feed(lease)
            mine = lease.sequence.logits().copy()
        cache.check()
        with prefix_kit.kit.context(tmp_path, n_ctx=1024) as fresh:
            sequence = fresh.sequence()
            sequence.prefill(prompt)
            assert (sequence.logits() == mine).all()
    stats = cache.stats()
    # The second prompt shares the cells that the first one has loaded.
    assert (stats.loaded_tokens, stats.stored_tokens, stats.damaged) == (603, 0, 0)
    assert stats.stored_bytes == cache.stored.store.size == stats.bytes_by_tier["files"] > 0
    assert stats.stored_pages == 4


def test_close_flushes_all_branches(start: Callable[..., PrefixCache]) -> None:
    """Leave a ``with`` block, also with an open lease."""
    with start() as cache:
        lease = cache.acquire([*SYSTEM, 1])
        lease.prefill()
    with start() as cache:
        assert serve(cache, [*SYSTEM, 1, 2]) == 21
        cache.context.close()
    with start() as cache:  # nothing was written without a context, and the lock is free
        assert serve(cache, [*SYSTEM, 1, 2, 3]) == 21


@pytest.mark.regression(
    "a prefix cache closed while another thread used the context lost unflushed tokens, and kept "
    "the lock of its store",
    by="hostile input",
    of="Python",
)
def test_a_cache_is_not_closed_while_another_thread_uses_the_context(
    start: Callable[..., PrefixCache],
) -> None:
    """Busy changes nothing, and the next call flushes and closes."""
    cache = start()
    serve(cache, [*SYSTEM, 1])
    used, done = threading.Event(), threading.Event()

    def use() -> None:
        with cache.context.lock:
            used.set()
            done.wait()

    thread = threading.Thread(target=use)
    thread.start()
    used.wait()
    with pytest.raises(errors.Busy):
        cache.close()
    done.set()
    thread.join()
    assert not cache.closed
    cache.close()
    assert serve(start(), [*SYSTEM, 1, 2]) == 21


def test_evicted_branches_are_loaded_again(start: Callable[..., PrefixCache]) -> None:
    """Serve more chats than sequences and cells."""
    cache = start(n_ctx=128, n_seq_max=2)
    chats = [[*SYSTEM, *[number] * 30] for number in range(6)]
    for chat in chats:
        serve(cache, chat)
    for chat in chats * 2:
        assert serve(cache, [*chat, 1]) == len(chat)
        chat.append(1)
    stats = cache.stats()
    assert stats.loaded_tokens > 0
    assert (stats.misses, stats.damaged) == (1, 0)
    kill(cache)
    cache = start(n_ctx=128, n_seq_max=1)  # another shape of the context, the same one of the cells
    for chat in chats[:4]:  # the last two were not evicted
        assert serve(cache, [*chat, 2]) == len(chat)


@pytest.mark.parametrize("place", ["memory", "files"])
def test_host_memory_is_used_before_the_store(
    start: Callable[..., PrefixCache], tmp_path: Path, place: str
) -> None:
    """Evicted branches are paged in without a read of the store; a killed process leaves all."""
    paging = "memory" if place == "memory" else tmp_path / "pages"
    cache = start(n_ctx=128, n_seq_max=2, paging=paging)
    chats = [[*SYSTEM, *[number] * 30] for number in range(6)]
    for chat in chats:
        serve(cache, chat)
    assert [serve(cache, [*chat, 1]) for chat in chats] == [50] * 6
    stats = cache.stats()
    assert (stats.loaded_tokens, stats.evictions) == (0, 0)
    assert stats.paged_in > 0
    assert stats.stored_tokens >= 20 + 5 * 30
    files = stats.stored_bytes + stats.paged_bytes * (place == "files")
    assert (stats.bytes_by_tier["files"], stats.bytes_by_tier["memory"]) == (
        files,
        stats.paged_bytes * (place == "memory"),
    )
    kill(cache)
    cache = start(n_ctx=128, n_seq_max=2, paging="memory")
    for chat in chats[:4]:  # the last two were not evicted
        assert serve(cache, [*chat, 2]) == 50
    assert cache.stats().loaded_tokens > 0


def test_a_page_dropped_for_the_budget_is_in_the_store(
    start: Callable[..., PrefixCache],
) -> None:
    """Serve more chats than cells and host memory can hold."""
    cache = start(n_ctx=128, n_seq_max=1, paging="memory")
    cache.budget = cache.branches.bytes_of(130)
    chats = [[number] * 50 for number in range(4)]
    for chat in chats:
        serve(cache, chat)
    assert cache.stats().evictions > 0
    assert serve(cache, [*chats[0], 9]) == 50
    assert cache.stats().loaded_tokens == 50


def test_longer_stored_prefix_replaces_the_resident_one(
    start: Callable[..., PrefixCache],
) -> None:
    """With one sequence, a resident part of the prefix does not prevent it."""
    cache = start(n_ctx=128, n_seq_max=1)
    serve(cache, [*SYSTEM, *[1] * 30])
    serve(cache, [*SYSTEM, 2])
    assert serve(cache, [*SYSTEM, *[1] * 30, 3]) == 50


def test_a_prefix_without_room_is_not_loaded(
    start: Callable[..., PrefixCache], caplog: pytest.LogCaptureFixture
) -> None:
    """Leases use the cells: the prompt is refused as without a store, without a change."""
    with start() as cache:
        serve(cache, LONG)
    cache = start(n_ctx=128)
    with cache.acquire([1] * 100) as lease:
        prefix_kit.feed(lease)
        with pytest.raises(errors.KVCacheFull):
            cache.acquire(LONG[:100])
        cache.check()
        assert serve(cache, [*LONG[:20], 1]) == 20
    assert caplog.messages == []


def test_a_grown_branch_rewrites_one_page(start: Callable[..., PrefixCache]) -> None:
    """A page that is not full is replaced by a longer one; full ones are not rewritten."""
    cache = start()
    chat = list(LONG[:300])
    for turn in range(4):
        serve(cache, [*chat, turn])
        chat.append(turn)
        cache.flush()
        pages = cache.stored.store.pages.values()
        assert sorted((page.start, page.end) for page in pages) == [(0, 256), (256, 301 + turn)]
    serve(cache, [*chat[:280], 7])
    cache.flush()
    pages = cache.stored.store.pages.values()
    assert sorted((page.start, page.end) for page in pages) == [(0, 256), (256, 304), (280, 281)]
    kill(cache)
    assert serve(start(), [*chat[:280], 7, 7]) == 281


def test_cells_are_stored_in_the_order_of_positions(
    start: Callable[..., PrefixCache],
) -> None:
    """The end of a branch has lower cells than its beginning."""
    cache = start(n_ctx=64)
    with cache.context.sequence() as other:
        other.prefill([1] * 20)
        lease = cache.acquire(SYSTEM)
        prefix_kit.feed(lease)
    prefix_kit.feed(lease, [5] * 30)
    snapshot = cache.context.kv.snapshot().streams[0]
    pos = snapshot.pos[snapshot.has(lease.sequence.id)].tolist()
    assert pos != sorted(pos)
    lease.release()
    cache.flush()
    assert {page.kind for page in cache.stored.store.pages.values()} == {"cells"}
    kill(cache)
    cache = start(n_ctx=64)
    with cache.acquire([*SYSTEM, *[5] * 30, 6]) as lease:
        assert lease.cached == 50
        prefix_kit.feed(lease)
        mine = lease.sequence.logits().copy()
    with prefix_kit.kit.context(cache.stored.store.folder.parent) as fresh:
        sequence = fresh.sequence()
        sequence.prefill([*SYSTEM, *[5] * 30, 6])
        assert (sequence.logits() == mine).all()


def test_stored_prefix_ends_before_a_token_group(start: Callable[..., PrefixCache]) -> None:
    """A stored prefix does not end inside of a group."""
    with start() as cache:
        serve(cache, LONG[:50])
    cache = start()
    with cache.acquire([*LONG[:45], 1, 1, 1], groups=[(40, 48)]) as lease:
        assert lease.cached == 40
    assert cache.stats().loaded_tokens == 40


def test_longer_stored_state_replaces_those_it_contains(
    start: Callable[..., PrefixCache], whole: None
) -> None:
    """States cannot be cut; a longer one replaces those that it contains."""
    cache = start()
    serve(cache, [*SYSTEM, 1, 2])
    assert cache.flush() == 22
    serve(cache, [*SYSTEM, 1, 2, 3])
    assert cache.flush() == 1
    assert cache.flush() == 0
    (page,) = cache.stored.store.pages.values()
    assert (page.kind, page.start, page.end) == ("state", 0, 23)
    serve(cache, [*SYSTEM, 4])
    assert cache.flush() == 1
    kill(cache)
    cache = start()
    assert serve(cache, [*SYSTEM, 1, 2, 3, 4]) == 23
    assert serve(cache, [*SYSTEM, 1, 5]) == 21
    assert serve(cache, [*SYSTEM, 4, 5]) == 21


# Invalid files...


@pytest.mark.parametrize("damage", ["header", "truncated", "missing"])
def test_pages_that_are_removed_when_a_store_is_opened_are_counted(
    start: Callable[..., PrefixCache], damage: str
) -> None:
    """Check a page and the one that follows it; a missing one is not counted."""
    with start() as cache:
        serve(cache, LONG)
        cache.flush()
        store = cache.stored.store
        path = store.path(next(page for page in store.pages.values() if page.start == 256))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(data if damage == "header" else data[:-1])
    with start() as cache:
        assert cache.stats().damaged == (1 if damage == "missing" else 2)
        assert serve(cache, [*LONG, 1]) == 256
        assert cache.stats().damaged == (1 if damage == "missing" else 2)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_page_ends_the_prefix_before_it(
    start: Callable[..., PrefixCache], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens before the page are reused, the others decoded; the page is written again."""
    with start() as cache:
        serve(cache, LONG)
    cache = start()
    store = cache.stored.store
    page = next(page for page in store.pages.values() if page.start == 256)
    path = store.path(page)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(data if damage == "flipped" else data[:-1])
    with cache.acquire([*LONG, 1]) as lease:
        assert lease.cached == 256
        prefix_kit.feed(lease)
        mine = lease.sequence.logits().copy()
        with cache.context.sequence() as fresh:
            fresh.prefill([*LONG, 1])
            assert (fresh.logits() == mine).all()
    cache.check()
    assert cache.stats().damaged == 1
    assert page.name in caplog.text
    assert cache.flush() == len(LONG) + 1 - 256
    kill(cache)
    assert serve(start(), [*LONG, 1, 2]) == len(LONG) + 1


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_damaged_last_page_leaves_no_cells(
    start: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch, n_seq_max: int
) -> None:
    """The pages before it were already restored or, with one sequence, joined."""
    with start() as cache:
        serve(cache, LONG)
    cache = start(n_seq_max=n_seq_max)
    store, context = cache.stored.store, cache.context
    page = next(page for page in store.pages.values() if page.start == 512)
    path = store.path(page)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    found = []

    def discard(page: prefix_store.StoredPage) -> None:
        left = (prefix_kit.used(cache), len(context.vacant), cache.branches.taken)
        found.append((page.start, *left))
        real(page)

    real = store.discard
    monkeypatch.setattr(prefix_kit, "used", kit.ours(prefix_kit.used))
    monkeypatch.setattr(store, "discard", kit.ours(discard))
    assert serve(cache, [*LONG, 1]) == 512
    assert found == [(512, 0, n_seq_max, 0)]


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_pages_are_loaded_with_and_without_a_second_sequence(
    start: Callable[..., PrefixCache], tmp_path: Path, n_seq_max: int
) -> None:
    """A second sequence is used temporarily, also beyond ``entries``; the result is the same."""
    with start() as cache:
        serve(cache, LONG)
    cache = start(n_seq_max=n_seq_max, entries=1)
    with cache.acquire([*LONG, 1]) as lease:
        assert lease.cached == len(LONG)
        assert len(cache.context.vacant) == n_seq_max - 1
        prefix_kit.feed(lease)
        mine = lease.sequence.logits().copy()
        with prefix_kit.kit.context(tmp_path, n_ctx=1024) as fresh:
            sequence = fresh.sequence()
            sequence.prefill([*LONG, 1])
            assert (sequence.logits() == mine).all()
    cache.check()


def test_pages_are_read_in_order_and_few_ahead() -> None:
    """An error is raised at its item; without threads, items are read one by one."""
    begun: list[int] = []

    def read(item: int) -> int:
        begun.append(item)
        if item == 5:
            raise ValueError(item)
        return -item

    found = []
    with pytest.raises(ValueError, match="5"):
        for each in directory_tier.read_ahead(read, range(9)):
            found.append(each)
            assert len(begun) <= len(found) + directory_tier.READERS
    assert found == [0, -1, -2, -3, -4]
    assert list(directory_tier.read_ahead(read, [])) == []


def test_pages_are_read_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of threads may be reached."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(directory_tier.read_ahead(lambda item: -item, range(6))) == [0, -1, -2, -3, -4, -5]


@pytest.mark.parametrize("content", [b"", b"no state of cells"])
def test_page_with_other_content_is_not_restored(
    start: Callable[..., PrefixCache], content: bytes
) -> None:
    """A page with right checksums, written by another program, is not restored."""
    with start() as cache:
        serve(cache, SYSTEM)
    cache = start()
    store = cache.stored.store
    (page,) = store.pages.values()
    store.discard(page)
    store.add("cells", b"", None, 0, page.tokens, content)
    assert serve(cache, [*SYSTEM, 1]) == 0
    assert cache.stats().damaged == 1
    cache.flush()
    kill(cache)
    assert serve(start(), [*SYSTEM, 1, 2]) == 21


def test_refused_stored_state_is_decoded_and_logged(
    start: Callable[..., PrefixCache], whole: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt is decoded, and the reason is logged."""
    with start() as cache:
        serve(cache, SYSTEM)
    cache = start()
    store = cache.stored.store
    (page,) = store.pages.values()
    store.discard(page)
    store.add("state", b"", None, 0, page.tokens, b"\1\0\0\0no state")
    assert serve(cache, [*SYSTEM, 1]) == 0
    assert "a stored prefix of 20 tokens is not used" in caplog.text


def test_full_disk_fails_the_flush_and_keeps_evictions(
    start: Callable[..., PrefixCache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`flush` raises, evictions continue, and everything is stored once there is space."""
    cache = start(n_seq_max=2)
    serve(cache, [*SYSTEM, 1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(errors.PrefixStoreFull, match="free disk space"):
            cache.flush()
        cache.check()
        assert serve(cache, [*SYSTEM, 2, 2]) == 20
        for number in (3, 4):
            serve(cache, [number] * 10)
        assert "tokens are not stored: " in caplog.text
    assert cache.flush() > 0
    serve(cache, [5] * 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(errors.PrefixStoreFull):
            cache.close()
    assert prefix_kit.used(cache) == 0
    cache = start()
    assert serve(cache, [4] * 11) == 10
    assert serve(cache, [5] * 11) == 0


def test_pages_that_cannot_be_opened_now_are_kept(
    start: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """With too many open files, the prompt is decoded; later, the pages are loaded."""
    with start() as cache:
        serve(cache, [*SYSTEM, 1])
    cache = start()
    real = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(prefix_store.SUFFIX):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert serve(cache, [*SYSTEM, 2]) == 0
    assert "a stored prefix of 20 tokens is not used: " in caplog.text
    assert cache.stats().damaged == 0
    assert serve(cache, [*SYSTEM, 1, 3]) == 21


@pytest.mark.regression(
    "one page that could not be written prevented a prefix cache from storing the other branches",
    by="hostile input",
    of="Python",
)
def test_a_page_that_cannot_be_written(start: Callable[..., PrefixCache]) -> None:
    """The other branches are written before the error is raised."""
    with start() as cache:
        serve(cache, [3] * 30)
    (page,) = cache.stored.store.pages.values()
    path = cache.stored.store.path(page)
    path.unlink()
    path.mkdir()
    cache = start()
    serve(cache, [3] * 30)
    serve(cache, [4] * 30)
    with pytest.raises(errors.PrefixStoreError, match="move it away"):
        cache.flush()
    path.rmdir()
    cache.context.close()
    cache.close()
    cache = start()
    assert serve(cache, [4] * 31) == 30
    assert serve(cache, [3] * 31) == 0


def test_a_forked_process_decodes_and_stores_nothing(
    start: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are served, flushes are refused; a damaged page is left to the parent."""
    with start() as cache:
        serve(cache, [*SYSTEM, 1])
    cache = start()
    before = sorted(cache.stored.store.folder.iterdir())
    monkeypatch.setattr(cache.stored.store, "_process", os.getpid() + 1)
    assert serve(cache, [*SYSTEM, 2]) == 0
    with pytest.raises(errors.PrefixStoreBusy, match="forked"):
        cache.flush()
    with pytest.raises(errors.PrefixStoreBusy, match="forked"):
        cache.close()
    assert sorted(cache.stored.store.folder.iterdir()) == before


def test_prompt_beyond_the_budget_is_refused(start: Callable[..., PrefixCache]) -> None:
    """The other prompts use the budget alternately."""
    with start() as cache:
        size = cache.branches.bytes_of(100)
    cache = start(budget=size)
    with pytest.raises(errors.BudgetTooSmall):
        cache.acquire(LONG)
    for number in range(5):
        serve(cache, [number] * 60)
        cache.flush()
        assert cache.stats().stored_bytes <= size
    # The bytes of a page's header can exceed the budget that K and V just fit.
    serve(cache, LONG[:100])
    with pytest.raises(errors.BudgetTooSmall, match="increase the budget"):
        cache.flush()
    cache.check()
    assert cache.stats().stored_bytes > 0
    kill(cache)
    assert serve(start(budget=size), [4] * 61) == 60


def test_second_writer_and_other_cell_shape_are_refused(
    start: Callable[..., PrefixCache], tmp_path: Path
) -> None:
    """A second cache and another shape of the cells are refused."""
    cache = start()
    serve(cache, SYSTEM)
    with pytest.raises(errors.PrefixStoreBusy):
        start()
    cache.close()
    with pytest.raises(errors.PrefixStoreForeign) as caught:
        make(tmp_path, store=tmp_path / "store", native={"contiguous": True}).close()
        other = prefix_kit.kit.context(tmp_path, type_k="q8_0", flash_attn=True)
        PrefixCache(other, store=tmp_path / "store")
    assert caught.value.differences == ("type_k", "v_transposed")
    with pytest.raises(errors.UsageError, match="store=PATH"):
        make(tmp_path).flush()
    for wrong in (5, "", b"x"):
        with pytest.raises(errors.UsageError):
            make(tmp_path, store=wrong)
    assert serve(start(), [*SYSTEM, 1]) == 20


def test_store_identity_excludes_context_sizes(tmp_path: Path) -> None:
    """Model, build, memory, types and layout are part of it; sizes are not."""
    found = directory_tier.identity(prefix_kit.kit.context(tmp_path))
    assert {"model", "build", "memory", "streams", "window", "type_k", "v_transposed"} <= set(found)
    assert found == directory_tier.identity(
        prefix_kit.kit.context(tmp_path, n_ctx=128, n_seq_max=2, n_batch=16)
    )
    assert all(type(value) is str for value in found.values())


def test_states_are_read_from_host_memory_before_the_store(tmp_path: Path) -> None:
    """States of prompts are written to both tiers; a killed process leaves branch points."""
    prompts = [[*SYSTEM, 60 + number, *[70] * 5] for number in range(4)]
    found: list[list[int]] = []
    for _ in range(2):
        context = kit.context(tmp_path, {"partial": False}, n_ctx=512, n_seq_max=1)
        object.__setattr__(context.info, "memory", MemoryType.RECURRENT)
        cache = PrefixCache(context, store=tmp_path / "store", paging="memory")
        found.append([serve(cache, each) for each in prompts])
        loaded = cache.stats().loaded_tokens
        found[-1] += [serve(cache, each) for each in prompts]
        assert cache.stats().loaded_tokens == loaded
        kill(cache)
    # The second prompt shows the branch point, and each has a state before its last token.
    assert found == [[0, 0, 20, 20, 25, 25, 25, 25], [25] * 8]


def test_a_stored_prompt_is_continued_before_its_last_token(tmp_path: Path) -> None:
    """The state after the whole prompt has no logits of its last token."""
    tokens = list(range(10, 30))
    for cached in (0, 19):
        context = kit.context(tmp_path, {"partial": False}, n_ctx=512)
        object.__setattr__(context.info, "memory", MemoryType.RECURRENT)
        with PrefixCache(context, store=tmp_path / "store") as cache:
            assert serve(cache, tokens) == cached


def test_a_cache_reads_the_store_of_another_one(
    start: Callable[..., PrefixCache], tmp_path: Path
) -> None:
    """It finds flushed pages of the other one, and writes nothing."""
    writer = start()
    serve(writer, [*LONG, 1])
    writer.flush()
    reader = start(store_read_only=True)
    assert serve(reader, [*LONG, 2]) == len(LONG)
    again = [7, *LONG]
    serve(writer, again)
    assert serve(reader, [*again, 5]) == 0
    reader.clear()
    writer.flush()
    assert serve(reader, [*again, 5]) == len(again)
    with pytest.raises(errors.UsageError, match="read it only"):
        reader.flush()
    reader.clear()
    assert reader.stats().stored_tokens == 0
    before = {path.name for path in (tmp_path / "store").iterdir()}
    reader.close()
    assert {path.name for path in (tmp_path / "store").iterdir()} == before
    # A page that the writer has removed is no damage.
    reader = start(store_read_only=True)
    assert writer.stored is not None
    seen = reader.stored.store  # type: ignore[union-attr]
    seen.refresh = lambda: None  # as between listing the directory and the read
    for page in list(writer.stored.store.pages.values()):
        if page.name in writer.stored.store.pages:
            writer.stored.store.discard(page)
    assert serve(reader, [*LONG, 3]) == 0
    assert reader.stats().damaged == 0
    writer.close()
    with pytest.raises(errors.UsageError, match="store="):
        prefix_kit.make(tmp_path, store_read_only=True)
