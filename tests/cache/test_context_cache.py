"""Test a cache in a context of a simulated library: creation, passes, refusals, free cells."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import runtime_kit
from cache_kit import forward, picture, simulated
from fakes.simulated import ALL
from hypothesis import given, settings
from hypothesis import strategies as st

import pyllamakv as kv
from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import Cancelled, KVCacheFull, SharedCells, Unsupported, UsageError

if TYPE_CHECKING:
    from pyllamakv.cache.context_cache import ContextCache


@pytest.fixture
def cache(tmp_path: Path) -> ContextCache:
    """Return a cache of 64 cells and 4 sequences."""
    return simulated(tmp_path)


def test_context_cache_implements_the_cache_protocol(cache: ContextCache) -> None:
    """The implementation has all methods of the interface."""
    one: kv.Cache = cache
    assert (one.max_sequences, one.capacity, one.max_batch) == (4, 64, 32)
    assert [one.length(i) for i in range(4)] == [0, 0, 0, 0]
    assert "4 sequences of 64 tokens" in repr(cache)


def test_init_creates_one_context_for_all_sequences(tmp_path: Path) -> None:
    """Its size is sequences times capacity, and no sequence may exceed its share."""
    model = runtime_kit.model(tmp_path)
    with kv.ContextCache.init(
        model, dtype=("f16", "f16"), max_sequences=3, capacity=16, max_batch=8
    ) as cache:
        assert cache.context.info.n_ctx == 48
        assert (cache.capacity, cache.max_batch, cache.max_sequences) == (16, 8, 3)
        for sequence in range(3):
            forward(cache, sequence, range(16))
        before = picture(cache)
        with pytest.raises(KVCacheFull, match="sequence 1 has 16 of 16 tokens") as caught:
            forward(cache, 1, [1])
        error = caught.value
        assert (error.cells, error.used, error.largest_hole, error.wanted) == (16, 16, 0, 1)
        assert picture(cache) == before
        assert cache.stats().full_errors == 1
    assert cache.context.closed


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_sequences": 0},
        {"capacity": 0},
        {"max_batch": -1},
        {"max_batch": True},
        {"capacity": 8, "max_batch": 9},
    ],
)
def test_invalid_cache_sizes_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    """A batch larger than a sequence, and invalid numbers, are refused at creation."""
    with pytest.raises(UsageError):
        kv.ContextCache.init(runtime_kit.model(tmp_path), **wrong)


def test_context_with_open_sequences_is_refused(tmp_path: Path) -> None:
    """Tokens and sequences of other users are kept."""
    ctx = runtime_kit.context(tmp_path)
    mine = ctx.sequence(2)
    with pytest.raises(UsageError, match="sequence 2 is in use"):
        kv.ContextCache(ctx)
    ctx.decode(mine.feed([1, 2]))
    with pytest.raises(UsageError, match="tokens already"):
        kv.ContextCache(ctx)
    assert mine.tokens == [1, 2]
    mine.close()
    kv.ContextCache(ctx).close()
    kv.ContextCache(ctx).close()  # everything was freed


def test_too_little_memory_is_an_error_at_creation(tmp_path: Path) -> None:
    """The memory of a batch is allocated at creation; after an error, none stays allocated."""
    ctx = runtime_kit.context(tmp_path)
    ctx.native.fail_next = [0, -3]
    with pytest.raises(kv.NotEnoughMemory, match="lower n_ctx, n_batch or n_ubatch"):
        kv.ContextCache(ctx)
    assert ctx.sequence(0).id == 0
    model = runtime_kit.model(tmp_path)
    model.native.fail_next = [MemoryError("none left")]
    with pytest.raises(kv.NotEnoughMemory):
        kv.ContextCache.init(model)
    assert model.native.freed == ["context"]


def test_single_token_pass_equals_the_general_pass(cache: ContextCache) -> None:
    """The faster pass of single tokens has the same result as the general one."""
    for place, token in enumerate([3, 5, 7]):
        cache.start_forward([token], [place], [0])
        cache.start_forward([token], [place], [1], [True])
    assert cache.sequences[0].tokens == cache.sequences[1].tokens == [3, 5, 7]
    cache.start_forward([1, 2, 4], [3, 3, 4], [0, 1, 0])
    assert cache.sequences[0].tokens == [3, 5, 7, 1, 4]
    assert cache.sequences[1].logits() is not None
    assert cache.sequences[0].logits() is not None
    assert cache.stats().decoded_tokens == 9
    cache.check()


@pytest.mark.parametrize(
    "work",
    [
        ([1], [1], [0]),
        ([1], [0], [4]),
        ([1], [0], [-1]),
        ([1, 2], [0, 2], [0, 0]),
        ([1, 2], [0], [0, 0]),
        ([], [], []),
        ([1] * 33, range(33), [0] * 33),
        ([1 << 20], [0], [0]),
    ],
)
def test_invalid_batch_changes_nothing(cache: ContextCache, work: tuple) -> None:
    """Gaps, foreign sequences and wrong lengths are refused without a change."""
    before = picture(cache)
    with pytest.raises(UsageError):
        cache.start_forward(*work)
    assert picture(cache) == before


def test_full_cache_error_has_counts_and_logs_cells(
    cache: ContextCache, caplog: pytest.LogCaptureFixture
) -> None:
    """The error has numbers, the debug log the map of cells, and nothing has changed."""
    forward(cache, 0, [1] * 40)
    forward(cache, 1, [2] * 20)
    before = picture(cache)
    with (
        caplog.at_level(logging.DEBUG, "pyllamakv.cache"),
        pytest.raises(KVCacheFull, match=r"cells: 64, used: 60, .*wanted: 5") as caught,
    ):
        forward(cache, 2, [3] * 5)
    error = caught.value
    assert (error.cells, error.used, error.largest_hole, error.wanted) == (64, 60, 4, 5)
    assert (error.cause, error.defragged) == ("full", False)
    assert "cells 40..59: positions 0..19 of sequences 1" in caplog.text
    assert picture(cache) == before
    forward(cache, 2, [3] * 4)
    cache.check()


def fragmented(cache: ContextCache) -> None:
    """Leave 32 free cells, no two of them adjacent."""
    for place in range(32):
        cache.start_forward([1, 2], [place, place], [0, 1])
    cache.remove(1, 0)


def test_a_fragmented_cache_is_defragmented_once(cache: ContextCache) -> None:
    """Enough cells are free, so the batch succeeds, and a counter records the defragmentation."""
    fragmented(cache)
    forward(cache, 2, [3] * 32)
    assert cache.stats().defrags == 1
    assert cache.sequences[0].tokens == [1] * 32
    cache.check()


def test_full_cache_without_defragmentation_reports_the_largest_hole(tmp_path: Path) -> None:
    """Without a defragmentation, the error does not mention one."""
    cache = simulated(tmp_path, {"capabilities": ALL & ~Capability.DEFRAG & ~Capability.STATES})
    fragmented(cache)
    before = picture(cache)
    with pytest.raises(KVCacheFull) as caught:
        forward(cache, 2, [3] * 8)
    assert (caught.value.cause, caught.value.defragged) == ("fragmented", False)
    assert caught.value.largest_hole == 1
    assert picture(cache) == before


def test_a_useless_defragmentation_is_tried_once_and_reported(cache: ContextCache) -> None:
    """It is not repeated."""
    fragmented(cache)
    cache.context.native.fail_next = [1, 1]
    with pytest.raises(KVCacheFull, match="did not help") as caught:
        forward(cache, 2, [3] * 8)
    assert caught.value.defragged
    assert cache.stats().defrags == 1
    cache.check()


def test_cancelled_pass_keeps_all_tokens(cache: ContextCache) -> None:
    """Every sequence keeps its tokens, and the pass may be repeated."""
    forward(cache, 0, [1] * 5)
    before = picture(cache)
    cache.context.native.cancel_after(cache.context.handle, 1)
    with pytest.raises(Cancelled):
        forward(cache, 0, [2] * 20)
    assert picture(cache) == before
    cache.context.native.cancel_after(cache.context.handle, -1)
    forward(cache, 0, [2] * 20)
    cache.check()


def test_negative_positions_and_backward_ranges_are_refused(cache: ContextCache) -> None:
    """Negative positions and backward ranges are refused."""
    for call in (
        lambda: cache.can_resume(0, -1),
        lambda: cache.can_resume(9, 0),
        lambda: cache.prepare_restore(0, -2),
        lambda: cache.remove(0, -1),
        lambda: cache.remove(0, 4, 3),
        lambda: cache.remove(7, 0),
        lambda: cache.length(-1),
    ):
        with pytest.raises(UsageError):
            call()


def test_full_attention_resumes_at_any_position(cache: ContextCache) -> None:
    """It does from the start to its end, and not beyond."""
    forward(cache, 0, range(5))
    assert [cache.can_resume(0, p) for p in range(7)] == [True] * 6 + [False]
    assert [cache.prepare_restore(0, p) for p in (0, 3, 5, 9)] == [0, 3, 5, 5]


def test_check_finds_lost_tokens_and_unowned_cells(cache: ContextCache) -> None:
    """A token that the library lost, and a cell without an owner, are found."""
    forward(cache, 0, range(5))
    cache.check()
    native, handle = cache.context.native, cache.context.handle
    native.seq_rm(handle, 0, 2, 3)
    with pytest.raises(AssertionError, match="sequence 0"):
        cache.check()
    cache.sequences[0].ledger.remove(2, 3)
    cache.check()
    native.seq_cp(handle, 0, 3, -1, -1)
    with pytest.raises(AssertionError, match="sequence 3"):
        cache.check()


def test_second_close_does_nothing(tmp_path: Path) -> None:
    """The second close has no effect after the context was freed, either."""
    cache = simulated(tmp_path)
    forward(cache, 0, [1])
    cache.context.close()
    cache.close()
    cache.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(0, 3), st.integers(1, 12), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 30)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 30), st.integers(0, 12)),
        st.tuples(st.just("unshare"), st.integers(0, 3), st.integers(0, 30), st.integers(0, 12)),
        st.tuples(st.just("cut"), st.integers(0, 3), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(STEPS, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=120)
def test_random_schedules_agree_with_plain_lists(
    steps: list[tuple[str, int, int, int]], partial: bool, can_shift: bool, heals: bool
) -> None:
    """Tokens are those of plain lists; a refused operation has changed nothing."""
    with tempfile.TemporaryDirectory() as folder:
        native = {"partial": partial, "can_shift": can_shift, "heals": heals}
        cache = simulated(Path(folder), native)
        plain: list[list[int]] = [[], [], [], []]
        for step, (what, a, b, c) in enumerate(steps):
            before = picture(cache)
            expected = [each.copy() for each in plain]
            try:
                if what == "forward":
                    other = c if c != a else None
                    ids = [a] * b + ([] if other is None else [other])
                    places = [len(plain[a]) + i for i in range(b)]
                    places += [] if other is None else [len(plain[other])]
                    tokens = [(step + i) % 50 for i in range(len(ids))]
                    for number, token in zip(ids, tokens, strict=True):
                        expected[number].append(token)
                    cache.start_forward(tokens, places, ids)
                elif what == "copy":
                    if a != b:
                        expected[b] = plain[a][:c]
                    assert cache.copy_prefix(a, b, c) == min(c, len(plain[a]))
                elif what == "cut":
                    del expected[a][b:]
                    assert cache.prepare_restore(a, b) <= min(b, len(plain[a]))
                    cache.remove(a, b)
                else:
                    del expected[a][b : b + c]
                    cache.remove(a, b, b + c, unshare=what == "unshare")
            except (KVCacheFull, Unsupported, SharedCells):
                assert picture(cache) == before
            else:
                plain = expected
            assert [each.tokens for each in cache.sequences] == plain
            assert all(each.positions == list(range(len(each))) for each in cache.sequences)
            cache.check()
        for number in range(4):
            cache.remove(number, 0)
        assert cache.context.kv.stats.used == 0
