"""Test the prefix cache over a simulated library: what is cached, what goes, what is refused.

Names in brackets are those of the tests of the caches that it is measured by. Where a test says
which bug of theirs it is about, they would fail it.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import prefix_kit
import pytest
import runtime_kit as kit
from prefix_kit import serve

from pyllamakv.cache.prefixes.cache import PrefixCache
from pyllamakv.errors import (
    BudgetTooSmall,
    Cancelled,
    Closed,
    KVCacheFull,
    NoSlotAvailable,
    PagingError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.cache.prefixes.paging import FilePager

SYSTEM = [10 + i % 40 for i in range(20)]


@pytest.fixture
def cache(tmp_path: Path) -> PrefixCache:
    """Make a cache of 4 sequences and 128 cells."""
    return make(tmp_path)


def make(folder: Path, **options: Any) -> PrefixCache:
    """Make a cache; what a context takes goes to the context."""
    names = ("n_ctx", "n_seq_max", "n_batch", "native")
    context = {name: options.pop(name) for name in names if name in options}
    return PrefixCache(kit.context(folder, **{"n_ctx": 128, **context}), **options)


def used(cache: PrefixCache) -> int:
    """Count the used cells."""
    return cache.context.kv.stats.used


@contextmanager
def cancelled(cache: PrefixCache, number: int) -> Iterator[None]:
    """Cancel a decode, counted from now, before it does anything."""
    native, calls = cache.context.native, itertools.count(1)
    real = native.decode

    def decode(*arguments: Any) -> int:
        return 2 if next(calls) == number else real(*arguments)

    native.decode = decode
    try:
        yield
    finally:
        native.decode = real


# The single entry...


def test_the_single_entry_keeps_the_longest_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hit, trim the rest, free everything on no match; hits, misses and sizes are in the log."""
    cache = make(tmp_path, entries=1)
    caplog.set_level(logging.INFO, "pyllamakv.cache")
    assert serve(cache, [1, 2, 3, 4], [5, 6]) == 0
    assert serve(cache, [1, 2, 3, 9]) == 3
    assert used(cache) == 4
    assert serve(cache, [7, 8]) == 0
    assert used(cache) == 2
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.reused, stats.asked) == (1, 2, 3, 10)
    assert (stats.resident, stats.cells, stats.nodes) == (1, 2, 1)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith("miss: 0 of 4 tokens cached, 4 to decode")
    assert second.startswith("hit: 3 of 4 tokens cached, 1 to decode")
    assert third.startswith("miss: 0 of 2 tokens cached")
    assert "cells" in third
    assert "bytes" in third


@pytest.mark.parametrize("entries", [1, None])
def test_an_exact_repeat_leaves_one_token_to_decode(tmp_path: Path, entries: int | None) -> None:
    """Repeat a prompt (ExactMatchSeedBehavior): no logits come from decoding nothing.

    The single entry of 5c73c4e2e panicked on a full hit, until dd5eb6337 held a token back.
    """
    cache = make(tmp_path, entries=entries)
    assert serve(cache, [1, 2, 3, 4]) == 0
    for _ in range(3):
        with cache.acquire([1, 2, 3, 4]) as lease:
            assert (lease.cached, lease.rest) == (3, [4])
            lease.prefill()
        cache.check()
    with cache.acquire([1]) as lease:
        assert (lease.cached, lease.rest) == (0, [1])
    assert used(cache) == 4 if entries is None else True


def test_an_empty_prompt_is_refused(cache: PrefixCache) -> None:
    """Ask for nothing: the original took a slice of minus one token, and panicked."""
    serve(cache, [1, 2])
    for wrong in ([], [259], [-1], [1] * 129):
        with pytest.raises(UsageError):
            cache.acquire(wrong)
    cache.check()
    assert used(cache) == 2


def test_two_conversations_do_not_thrash(cache: PrefixCache) -> None:
    """Alternate between two chats, at which the original's single entry began anew each time."""
    a, b = [*SYSTEM, 1], [*SYSTEM, 2]
    assert serve(cache, a, [3]) == 0
    assert serve(cache, b, [4]) == 20
    for _ in range(3):
        a, b = [*a, 3, 5], [*b, 4, 6]
        assert serve(cache, a, [3]) == len(a) - 1
        assert serve(cache, b, [4]) == len(b) - 1


# The tree...


def test_branches_share_the_cells_of_their_beginning(cache: PrefixCache) -> None:
    """Make two branches and reuse both (BranchCreationAndReuse): no cell is there twice."""
    assert serve(cache, [*SYSTEM, 1, 2, 3]) == 0
    assert serve(cache, [*SYSTEM, 4, 5]) == 20
    assert used(cache) == 20 + 3 + 2
    assert serve(cache, [*SYSTEM, 1, 2, 3, 6]) == 23
    assert serve(cache, [*SYSTEM, 4, 5, 7]) == 22
    assert used(cache) == 20 + 4 + 3
    assert cache.stats().nodes == 3
    assert cache.context.kv.stats.shared == 20


def test_a_part_of_a_run_is_reused(cache: PrefixCache) -> None:
    """Match 19 of 20 tokens: an original before 77491439c reused whole runs only."""
    serve(cache, SYSTEM)
    assert serve(cache, [*SYSTEM[:19], 1]) == 19
    assert used(cache) == 21


def test_a_conversation_goes_on(cache: PrefixCache) -> None:
    """Take turns (ConversationResumption, ScenarioConversationTurns): only new tokens are decoded.

    Nothing grows but the conversation: the trie of 44bdd9a2e kept a whole cache of every turn.
    """
    chat: list[int] = []
    for turn in range(8):
        chat += [turn + 1, turn + 2, turn + 3]
        assert serve(cache, chat, [90 + turn, 80 + turn]) == max(0, len(chat) - 3)
        chat += [90 + turn, 80 + turn]
    assert (used(cache), cache.stats().resident, cache.stats().nodes) == (40, 1, 1)


def test_the_same_tokens_decoded_at_once_become_one(cache: PrefixCache) -> None:
    """Lease the same prompt twice before it is decoded: in the end its cells are there once."""
    one, two = cache.acquire([*SYSTEM, 1]), cache.acquire([*SYSTEM, 2])
    one.prefill()
    two.prefill()
    assert used(cache) == 42
    one.release()
    two.release()
    cache.check()
    assert used(cache) == 22
    with cache.acquire([*SYSTEM, 3]) as lease:
        assert lease.cached == 20
    one.release()  # a second time
    cache.check()


def test_a_lease_is_a_source_for_others(cache: PrefixCache) -> None:
    """Fork what is in use, as far as it is decoded."""
    with cache.acquire([*SYSTEM, 1]) as one:
        one.prefill()
        with cache.acquire([*SYSTEM, 2]) as two:
            assert two.cached == 20
            two.prefill()
            assert used(cache) == 22
        cache.check()
    cache.check()


def test_groups_are_not_entered(cache: PrefixCache) -> None:
    """End the cached beginning before a group of tokens that it would divide."""
    serve(cache, SYSTEM)
    for groups, cached in (([(15, 25)], 15), ([(15, 19)], 19), ([(18, 22), (12, 18)], 18)):
        with cache.acquire([*SYSTEM[:19], 1, 2], groups=groups) as lease:
            assert lease.cached == cached


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_shifted_is_no_beginning(cache: PrefixCache, saved: bool) -> None:
    """Remove tokens in the middle of a leased sequence: what is left is not reused."""
    with cache.acquire(SYSTEM) as lease:
        lease.prefill()
        lease.sequence.remove(2, 6)
        lease.sequence.shift(6, None, -4)
        if saved:
            lease.sequence.restore(lease.sequence.save())
    cache.check()
    assert (used(cache), cache.stats().nodes) == (0, 0)


def test_what_was_trimmed_is_kept_as_it_is(cache: PrefixCache) -> None:
    """Go back in a leased sequence and go on otherwise."""
    serve(cache, SYSTEM)
    with cache.acquire([*SYSTEM, 1]) as lease:
        lease.prefill()
        lease.sequence.trim(5)
        cache.context.step(lease.sequence, 99)
    cache.check()
    assert serve(cache, [*SYSTEM[:5], 99, 98]) == 6
    with cache.acquire([1, 2]) as lease:
        lease.prefill()
        lease.sequence.close()
    cache.check()


# Cancelling...


def test_a_cancelled_prompt_keeps_its_progress(tmp_path: Path) -> None:
    """Cancel twice (ScenarioCancelledPrefills, PrefillSnapshotsKeptOnCancel): 18, 36, done.

    An original threw away what a cancelled prompt had decoded, so that retries never got anywhere
    (ollama #17839).
    """
    cache = make(tmp_path, n_batch=18)
    prompt = [i % 50 for i in range(50)]
    for expected in (0, 18, 36):
        with cache.acquire(prompt) as lease:
            assert lease.cached == expected
            if expected < 36:
                with cancelled(cache, 2), pytest.raises(Cancelled):
                    lease.prefill()
            else:
                lease.prefill()
        cache.check()
    with cache.acquire(prompt) as lease:
        assert lease.cached == 49


def test_cancelled_prompts_that_part_keep_both(tmp_path: Path) -> None:
    """Cancel two prompts behind their common beginning (ScenarioDivergentCancels)."""
    cache = make(tmp_path, n_batch=10)
    prompts = [[*SYSTEM, *[tail] * 20] for tail in (1, 2)]
    for number, prompt in enumerate(prompts):
        with cache.acquire(prompt) as lease:
            assert lease.cached == (0, 20)[number]
            with cancelled(cache, 4 - 2 * number), pytest.raises(Cancelled):
                lease.prefill()
        cache.check()
    for prompt in prompts:
        assert serve(cache, prompt) == 30


# Who goes...


def test_the_least_recently_used_branch_goes_first(tmp_path: Path) -> None:
    """Run out of sequences (LRUOnlyUpdatesUsedNodes): what a new prompt only passes by stays old.

    Before ac5f0dbb6 the original made everything below a match as young as the match.
    """
    cache = make(tmp_path, n_seq_max=3)
    a, b = [*SYSTEM, 1, 1], [*SYSTEM, 2, 2]
    serve(cache, a)
    serve(cache, b)
    serve(cache, [*SYSTEM, 3, 3])
    serve(cache, [*SYSTEM, 4, 4])  # a goes: its beginning was used by all, its own tokens were not
    assert serve(cache, [*b, 5]) == 22
    assert serve(cache, [*a, 5]) == 20
    assert cache.stats().evicted == 2


def test_active_conversations_are_never_evicted(tmp_path: Path) -> None:
    """Fill the cache beside a leased conversation (EvictionPreservesActiveConversations)."""
    cache = make(tmp_path, n_ctx=64)
    with cache.acquire([*SYSTEM, 1]) as lease:
        lease.prefill()
        for number in range(6):
            serve(cache, [100 + number] * 30)
        assert lease.sequence.tokens == [*SYSTEM, 1]
        lease.make_room(30)
        cache.context.prefill(lease.sequence, [2] * 30)
        with pytest.raises(KVCacheFull) as caught:
            lease.make_room(20)
        assert (caught.value.cells, caught.value.used, caught.value.wanted) == (64, 51, 20)
    cache.check()
    assert serve(cache, [*SYSTEM, 1, 2]) == 21


def test_cells_run_out_before_sequences(tmp_path: Path) -> None:
    """Need the cells of one's own old tail, and of others."""
    cache = make(tmp_path, n_ctx=64)
    serve(cache, [5] * 60)
    assert serve(cache, [*([5] * 10), *([6] * 50)]) == 10
    assert used(cache) == 60
    serve(cache, [7] * 64)
    assert (used(cache), cache.stats().resident) == (64, 1)


def test_all_sequences_leased_is_an_error(tmp_path: Path) -> None:
    """Lease them all: the original's multi-user choice took a slot that was not there."""
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


def test_a_prompt_that_finds_no_room_changes_nothing(tmp_path: Path) -> None:
    """Ask for more than the leases leave."""
    cache = make(tmp_path, n_ctx=64)
    serve(cache, [3] * 20)
    with cache.acquire([1] * 40) as lease:  # promised, not decoded
        before = prefix_kit.leaves(cache)
        with pytest.raises(KVCacheFull):
            cache.acquire([3] * 30 + [2])
        assert prefix_kit.leaves(cache) == before
        cache.check()
        lease.prefill()
    cache.check()


def test_what_others_hold_in_the_context_stays(tmp_path: Path) -> None:
    """Use a sequence beside the cache."""
    context = kit.context(tmp_path, n_ctx=64, n_seq_max=3)
    mine = context.sequence()
    context.prefill(mine, [4] * 30)
    cache = PrefixCache(context)
    for number in range(5):
        serve(cache, [50 + number] * 25)
    assert mine.tokens == [4] * 30
    with pytest.raises(KVCacheFull):
        cache.acquire([9] * 40)
    cache.close()
    assert (context.kv.stats.used, len(mine)) == (30, 30)


# Pins...


def test_a_pinned_beginning_outlives_its_branches(tmp_path: Path) -> None:
    """Pin a system prompt (UserSnapshotPreservesRestorePoint) and let everything else go."""
    cache = make(tmp_path, n_ctx=64, n_seq_max=3)
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


def test_a_pin_names_what_is_there(cache: PrefixCache) -> None:
    """Pin what is not cached, pin twice under one name, and let go of no pin."""
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
    """Pin as many beginnings as there are sequences."""
    cache = make(tmp_path, n_seq_max=2)
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


def test_the_budget_bounds_what_is_kept(tmp_path: Path) -> None:
    """Serve more than fits: an original's trie grew without limit."""
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
        cache.context.prefill(lease.sequence, [9] * 40)  # what is leased is never cut short
    assert cache.stats().bytes == 0
    cache.check()


def test_a_budget_below_one_entry_is_refused(tmp_path: Path) -> None:
    """Ask for less than a token, and for a prompt that is larger than the budget."""
    with pytest.raises(BudgetTooSmall) as caught:
        make(tmp_path, budget=10)
    assert caught.value.needed > caught.value.budget == 10
    cache = make(tmp_path, budget=caught.value.needed * 10)
    serve(cache, [1] * 8)
    with pytest.raises(BudgetTooSmall):
        cache.acquire([2] * 11)
    assert serve(cache, [1] * 9) == 8


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
    assert (stats.misses, stats.evicted, stats.damaged) == (1, 0, 0)
    assert stats.paged_in >= 6
    cache.close()
    assert used(cache) == 0
    assert list(tmp_path.rglob("*.kvpage")) == []


def test_a_page_holds_what_nothing_else_does(tmp_path: Path) -> None:
    """Page a tail out: its bytes are those of the tail (PagedOutBytesUpdatesOnMaterialize).

    A snapshot of the original kept the whole buffer alive that it was a part of (d1151e18a).
    """
    cache = make(tmp_path, paging="memory", n_ctx=256)
    serve(cache, [1] * 100 + [2] * 5)
    serve(cache, [1] * 100 + [3] * 5)
    cache.page_out([1] * 100 + [2] * 5)
    cache.check()
    stats = cache.stats()
    assert (used(cache), stats.resident, stats.paged) == (105, 1, 1)
    assert stats.paged_bytes < cache.branches.bytes_of(20)
    cache.page_out([1] * 100 + [3] * 5)  # the last one takes the beginning along
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
    """Go on from inside of a branch that is paged out (SplitPreservesData).

    An original's snapshot had to span exactly its node, or 46 of 47 thousand tokens were decoded
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


def test_a_page_is_what_it_was(tmp_path: Path) -> None:
    """Use a branch's cells for something else after it was paged out: the page does not change.

    A snapshot that was made lazily was overwritten, and gave one user another one's tokens
    (144893850).
    """
    cache = make(tmp_path, n_ctx=64, n_seq_max=2, paging="memory")
    serve(cache, [1] * 30)
    cache.page_out([1] * 30)
    serve(cache, [2] * 60)
    assert serve(cache, [*([1] * 30), 5]) == 30
    rows = cache.context.kv.rows(
        0, cache.branches.provider(cache.branches.tree.match(b"\1\0\0\0")[0])
    )
    with kit.context(tmp_path) as fresh:
        mine = fresh.sequence()
        fresh.prefill(mine, [*([1] * 30), 5])
        assert (rows.k == fresh.kv.rows(0, mine).k).all()


def test_the_budget_counts_pages(tmp_path: Path) -> None:
    """Page out under a budget: the oldest branch goes, resident or not."""
    cache = make(tmp_path, n_seq_max=2, paging="memory")
    cache.budget = cache.branches.bytes_of(60)
    for number in range(8):
        serve(cache, [number] * 10)
        assert cache.stats().bytes <= cache.budget
    assert cache.stats().evicted > 0
    assert serve(cache, [7] * 11) == 10
    assert serve(cache, [0] * 11) == 0


def test_pinned_branches_may_be_paged_out(tmp_path: Path) -> None:
    """Pin two branches where there is one sequence."""
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
    """Let no file be written any more."""

    def replace(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", replace)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page out by hand and under pressure on a full disk: a typed error, the cache as it was."""
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
    assert cache.evict()  # the cure that the error names
    assert serve(cache, [*SYSTEM, 3]) == 20
    monkeypatch.undo()
    assert serve(cache, [*SYSTEM, 4]) == 20


@pytest.mark.parametrize("damage", ["gone", "truncated", "foreign"])
def test_a_damaged_page_is_an_error_and_a_miss(tmp_path: Path, damage: str) -> None:
    """Read a page that is no more: by hand a typed error, for a prompt as if it never was."""
    cache = make(tmp_path, paging=tmp_path / "pages")
    serve(cache, [*SYSTEM, 1])
    cache.page_out([*SYSTEM, 1])
    serve(cache, [9, 9])
    pager: FilePager = cache.branches.pager  # type: ignore[assignment]
    (path,) = pager.folder.iterdir()
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
    """Swap what two pages hold: tokens are compared, not believed."""
    cache = make(tmp_path, paging="memory")
    pages = []
    for number in (1, 2):
        serve(cache, [number] * 10)
        cache.page_out([number] * 10)
        pages.append(cache.branches.tree.match(bytes([number, 0, 0, 0]))[0].page)
    pages[0]._saved, pages[1]._saved = pages[1]._saved, pages[0]._saved
    with pytest.raises(PagingError, match="holds others"):
        cache.page_in([1] * 10)
    assert serve(cache, [2] * 10) == 0
    cache.check()


def test_what_cannot_be_paged_says_so(tmp_path: Path) -> None:
    """Page out what is not there, what is leased, and without a place for pages."""
    cache = make(tmp_path, paging="memory")
    serve(cache, SYSTEM)
    with pytest.raises(UsageError, match="no branch"):
        cache.page_out(SYSTEM[:5])
    with cache.acquire([*SYSTEM, 1]), pytest.raises(UsageError, match="leased"):
        cache.page_out(SYSTEM)
    cache.page_in(SYSTEM)  # it is in
    cache.page_out(SYSTEM)
    cache.page_out(SYSTEM)  # it is out
    other = make(tmp_path)
    serve(other, SYSTEM)
    with pytest.raises(UsageError, match="paging="):
        other.page_out(SYSTEM)


def test_scattered_cells_are_gathered_for_a_page(tmp_path: Path) -> None:
    """Page in where no two of the free cells lie together (llama.cpp #9201, #17527)."""
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


# Lifetime and all at once...


def test_a_closed_cache_leaves_nothing(cache: PrefixCache) -> None:
    """Close with a lease open, and use neither any more."""
    serve(cache, SYSTEM)
    lease = cache.acquire([1, 2])
    with cache:
        pass
    cache.close()
    assert used(cache) == 0
    lease.release()
    with pytest.raises(Closed):
        cache.acquire([1])
    with pytest.raises(Closed):
        cache.context.prefill(lease.sequence, [1])
    assert len(cache.context.vacant) == 4


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """Ask for no sequences, and for more than there are."""
    for entries in (0, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            make(tmp_path, entries=entries)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"paging": "memory"},
    {"budget": 20_000},
    {"paging": "memory", "budget": 20_000},
    {"entries": 1},
    {"entries": 1, "paging": "memory"},
    {"entries": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_keeps_every_invariant(
    tmp_path: Path, options: dict[str, Any], seed: int
) -> None:
    """Do everything at random, checking the tree, the pages and the cells after each operation."""
    n_ctx = 128 if seed % 2 else 256
    context = kit.context(tmp_path, n_ctx=n_ctx, n_seq_max=4 + seed)
    traffic = prefix_kit.Traffic(context, seed, **options)
    traffic.run(200)
    assert traffic.cache.stats().hits > 0
    traffic.cache.close()
    assert context.kv.stats.used == 0
