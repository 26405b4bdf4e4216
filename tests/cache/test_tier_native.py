"""Test branches of a prefix cache that are paged out and in, and lost pages.

Names in parentheses are those of ollama's tests; hashes are commits of ollama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import prefix_kit
import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, make, serve, used

from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import PagingError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.tier import FileTier


@pytest.fixture
def cache(tmp_path: Path) -> PrefixCache:
    """Create a cache of 4 sequences and 128 cells."""
    return make(tmp_path)


# Pages...
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_branches_are_paged_out_and_in(tmp_path: Path, where: str) -> None:
    """Serve more chats than there are sequences (BranchSwitchRestoresCorrectState)."""
    paging = "memory" if where == "memory" else tmp_path / "pages"
    cache = make(tmp_path, n_seq_max=3, paging=paging)
    chats = [[*SYSTEM, number, number] for number in range(6)]
    for chat in chats:
        serve(cache, chat)
    for chat in chats * 2:
        assert serve(cache, [*chat, 1]) >= len(chat)
    stats = cache.stats()
    assert (stats.misses, stats.evictions, stats.damaged) == (1, 0, 0)
    assert stats.paged_in >= 6
    cache.close()
    assert used(cache) == 0
    assert list(tmp_path.rglob("*.kvpage")) == []


def test_page_contains_only_the_tail(tmp_path: Path) -> None:
    """Page a tail out: its bytes are those of the tail (PagedOutBytesUpdatesOnMaterialize).

    A snapshot of ollama kept a reference to its whole buffer.
    """
    cache = make(tmp_path, paging="memory", n_ctx=256)
    serve(cache, [1] * 100 + [2] * 5)
    serve(cache, [1] * 100 + [3] * 5)
    cache.page_out([1] * 100 + [2] * 5)
    cache.check()
    stats = cache.stats()
    assert (used(cache), stats.resident, stats.paged) == (105, 1, 1)
    assert stats.paged_bytes < cache.branches.bytes_of(20)
    cache.page_out([1] * 100 + [3] * 5)  # the last one includes the beginning
    cache.check()
    stats = cache.stats()
    assert (used(cache), stats.resident_bytes, stats.paged) == (0, 0, 2)
    assert stats.paged_bytes > cache.branches.bytes_of(110)
    cache.page_in([1] * 100 + [2] * 5)
    cache.check()
    assert (used(cache), cache.stats().resident) == (105, 1)
    assert serve(cache, [1] * 100 + [3] * 6) == 105
    assert (used(cache), cache.stats().paged_bytes) == (111, 0)


def test_a_divided_page_serves_both_parts(tmp_path: Path) -> None:
    """Continue from inside of a branch that is paged out (SplitPreservesData).

    Ollama's snapshot had to span exactly its node, or 46 of 47 thousand tokens were decoded
    again (b315b3ee9, 81f9a394e).
    """
    cache = make(tmp_path, paging="memory")
    serve(cache, [*SYSTEM, 1, 2])
    cache.page_out([*SYSTEM, 1, 2])
    assert serve(cache, [*SYSTEM, 3]) == 20
    assert serve(cache, [*SYSTEM, 1, 2, 4]) == 22
    cache.page_out([*SYSTEM, 3])
    cache.pin("half", SYSTEM[:10])
    cache.page_out([*SYSTEM, 1, 2, 4])
    cache.check()
    assert serve(cache, [*SYSTEM[:10], 5]) == 10
    cache.check()


def test_page_is_unchanged_by_reuse_of_its_cells(tmp_path: Path) -> None:
    """Reuse a branch's cells after it was paged out: the page does not change.

    A lazy snapshot of ollama was overwritten, so that a user got tokens of another one
    (144893850).
    """
    cache = make(tmp_path, n_ctx=64, n_seq_max=2, paging="memory")
    serve(cache, [1] * 30)
    cache.page_out([1] * 30)
    serve(cache, [2] * 60)
    assert serve(cache, [*([1] * 30), 5]) == 30
    rows = cache.context.kv.rows(
        0, cache.branches.source(cache.branches.tree.match(b"\1\0\0\0", b"")[0])
    )
    with kit.context(tmp_path) as fresh:
        mine = fresh.sequence()
        mine.prefill([*([1] * 30), 5])
        assert (rows.k == fresh.kv.rows(0, mine).k).all()


def test_the_budget_counts_pages(tmp_path: Path) -> None:
    """The oldest branch is evicted, resident or not."""
    cache = make(tmp_path, n_seq_max=2, paging="memory")
    cache.budget = cache.branches.bytes_of(60)
    for number in range(8):
        serve(cache, [number] * 10)
        assert cache.stats().bytes <= cache.budget
    assert cache.stats().evictions > 0
    assert serve(cache, [7] * 11) == 10
    assert serve(cache, [0] * 11) == 0


def test_pinned_branches_may_be_paged_out(tmp_path: Path) -> None:
    """Pin two branches with one sequence."""
    cache = make(tmp_path, n_seq_max=1, paging="memory")
    for number in (1, 2):
        serve(cache, [number] * 10)
        cache.pin(f"{number}", [number] * 10)
        cache.check()
    serve(cache, [3] * 10)
    cache.clear()
    cache.check()
    assert serve(cache, [1] * 12) == 10
    assert serve(cache, [2] * 12) == 10
    cache.unpin("1")
    cache.unpin("2")
    cache.clear()
    assert cache.stats().bytes == 0


def fill_disk(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all writes of files fail."""

    def replace(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", replace)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page out explicitly and on demand on a full disk: a typed error, without a change."""
    cache = make(tmp_path, n_seq_max=2, paging=tmp_path / "pages")
    serve(cache, [*SYSTEM, 1])
    serve(cache, [*SYSTEM, 2])
    fill_disk(cache, monkeypatch)
    before, cells = prefix_kit.leaves(cache), cache.context.kv.snapshot()
    for attempt in (lambda: cache.page_out([*SYSTEM, 1]), lambda: cache.acquire([*SYSTEM, 3])):
        with pytest.raises(PagingError, match="No space left"):
            attempt()
        cache.check()
        assert prefix_kit.leaves(cache) == before
        assert not len(cells.moves_to(cache.context.kv.snapshot()))
    assert cache.evict()  # the remedy of the error
    assert serve(cache, [*SYSTEM, 3]) == 20
    monkeypatch.undo()
    assert serve(cache, [*SYSTEM, 4]) == 20


@pytest.mark.parametrize("damage", ["gone", "truncated", "foreign"])
def test_a_damaged_page_is_an_error_and_a_miss(tmp_path: Path, damage: str) -> None:
    """An explicit read of a missing page is a typed error; for a prompt it is a miss."""
    cache = make(tmp_path, paging=tmp_path / "pages")
    serve(cache, [*SYSTEM, 1])
    cache.page_out([*SYSTEM, 1])
    serve(cache, [9, 9])
    pages: FileTier = cache.branches.tier  # type: ignore[assignment]
    (path,) = pages.folder.iterdir()
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-20] if damage == "truncated" else b"something else")
    before = prefix_kit.leaves(cache)
    with pytest.raises(PagingError) as caught:
        cache.page_in([*SYSTEM, 1])
    assert caught.value.path == path
    cache.check()
    assert prefix_kit.leaves(cache) == before
    assert serve(cache, [*SYSTEM, 1]) == 0
    assert (cache.stats().damaged, cache.stats().paged) == (1, 0)
    assert serve(cache, [*SYSTEM, 2]) == 20


def test_a_page_of_other_tokens_is_not_used(tmp_path: Path) -> None:
    """Two pages are exchanged: their tokens are compared."""
    cache = make(tmp_path, paging="memory")
    pages = []
    for number in (1, 2):
        serve(cache, [number] * 10)
        cache.page_out([number] * 10)
        pages.append(cache.branches.tree.match(bytes([number, 0, 0, 0]), b"")[0].page)
    pages[0]._saved, pages[1]._saved = pages[1]._saved, pages[0]._saved
    with pytest.raises(PagingError, match="contains other tokens"):
        cache.page_in([1] * 10)
    assert serve(cache, [2] * 10) == 0
    cache.check()


def test_page_out_of_leased_or_missing_branches_is_refused(tmp_path: Path) -> None:
    """They are refused for a missing branch, a leased one, and without a tier."""
    cache = make(tmp_path, paging="memory")
    serve(cache, SYSTEM)
    with pytest.raises(UsageError, match="no branch"):
        cache.page_out(SYSTEM[:5])
    with cache.acquire([*SYSTEM, 1]), pytest.raises(UsageError, match="leased"):
        cache.page_out(SYSTEM)
    cache.page_in(SYSTEM)  # resident
    cache.page_out(SYSTEM)
    cache.page_out(SYSTEM)  # paged out
    other = make(tmp_path, paging=0)
    serve(other, SYSTEM)
    with pytest.raises(UsageError, match="paging="):
        other.page_out(SYSTEM)


def test_scattered_cells_are_gathered_for_a_page(tmp_path: Path) -> None:
    """Page in if no two free cells are adjacent (llama.cpp #9201, #17527)."""
    cache = make(tmp_path, n_ctx=64, n_seq_max=4, paging="memory")
    serve(cache, [1] * 30)
    cache.page_out([1] * 30)
    context = cache.context
    a, b = context.sequence(), context.sequence()
    for _ in range(32):
        context.decode([a.feed([1]), b.feed([2])])
    b.close()
    assert context.kv.stats.largest_hole == 1
    assert serve(cache, [1] * 31) == 30
    assert len(a) == 32
