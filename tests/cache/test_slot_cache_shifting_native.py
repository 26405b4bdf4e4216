"""Test full slots: shift, kept head, repeated evaluation, whole groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit
from slots_kit import fill, fresh

from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Cancelled, KVCacheFull, ReprocessNeeded, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 64 cells and 4 sequences."""
    return kit.context(tmp_path)


def test_shift_keeps_the_head_and_the_newest(ctx: Context) -> None:
    """Of ten tokens, two are kept, four discarded, six left; the next one has position 6."""
    cache = SlotCache(ctx, 4, keep=2, size=10)
    lease = cache.acquire(range(20, 30))
    lease.decode()
    lease.make_room(1)
    assert lease.sequence.tokens == [20, 21, 26, 27, 28, 29]
    assert lease.sequence.positions == list(range(6))
    assert ctx.kv.stats.used == 6
    lease.decode([30])
    assert cache.stats().shifts == 1
    cache.check()


def test_a_head_that_fills_the_slot_leaves_one_place(ctx: Context) -> None:
    """Keeping all tokens of the context is an error in ollama; here one token is left."""
    cache = SlotCache(ctx, 4, keep=99, size=10)
    lease = cache.acquire(range(20, 30))
    lease.decode()
    lease.make_room(1)
    assert lease.sequence.tokens == list(range(20, 29))
    with pytest.raises(KVCacheFull) as caught:
        lease.make_room(2)
    assert (caught.value.cells, caught.value.wanted) == (10, 2)
    assert lease.sequence.tokens == list(range(20, 29))


def test_keep_counts_from_the_models_first_token(ctx: Context) -> None:
    """A negative number keeps the whole prompt; the first token is always kept."""
    cache = SlotCache(ctx, 4, keep=2, size=10)
    for tokens, keep, kept in (
        ([1, 5, 6, 7], None, 3),
        ([5, 6, 7, 8], None, 2),
        ([1, 5, 6, 7], -1, 4),
        ([1, 5, 6, 7], 0, 1),
        (range(10, 20), -1, 9),
    ):
        with cache.acquire(tokens, keep=keep) as lease:
            assert lease.keep == kept


@pytest.mark.parametrize("native", [{"can_shift": False}, {"partial": False}])
def test_memory_without_shifts_decodes_the_kept_tokens_again(tmp_path: Path, native: dict) -> None:
    """The error has the tokens after the head; decoding them equals a new start."""
    ctx = kit.context(tmp_path, native)
    cache = SlotCache(ctx, 4, keep=2, size=10)
    lease = cache.acquire(range(20, 30))
    lease.decode()
    with pytest.raises(ReprocessNeeded) as caught:
        lease.make_room(1)
    left = lease.sequence.tokens
    assert left == ([20, 21] if native.get("partial", True) else [])
    assert [*left, *caught.value.tokens] == [20, 21, 26, 27, 28, 29]
    lease.sequence.prefill(caught.value.tokens)
    lease.make_room(1)
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, [20, 21, 26, 27, 28, 29]))
    cache.check()


@pytest.mark.parametrize("native", [{}, {"can_shift": False}, {"partial": False}])
def test_decode_shifts_a_full_slot_automatically(tmp_path: Path, native: dict) -> None:
    """Fifty tokens are decoded in ten cells, whatever the memory supports."""
    ctx = kit.context(tmp_path, native)
    cache = SlotCache(ctx, 4, keep=2, size=10)
    lease = cache.acquire([20, 21])
    lease.decode()
    expected = [20, 21]
    for token in range(30, 80):
        if len(expected) == 10:
            expected[2:6] = []
        lease.decode(token)
        expected.append(token)
        assert lease.sequence.tokens == expected
        cache.check()
    assert (cache.stats().shifts > 0) is (not native)
    assert (cache.stats().reprocessed > 0) is bool(native)


@pytest.mark.parametrize("native", [{"can_shift": False}, {"partial": False}])
def test_interrupted_shift_is_completed_later(tmp_path: Path, native: dict) -> None:
    """Discarded tokens that were not decoded again are kept for later if that is cancelled."""
    ctx = kit.context(tmp_path, native, n_batch=2, n_ubatch=2)
    cache = SlotCache(ctx, 4, keep=2, size=10)
    for by_hand in (False, True):
        lease = cache.acquire(range(20, 30))
        lease.decode()
        calls, real = iter(range(9)), ctx.native.decode
        ctx.native.decode = lambda *args, calls=calls, real=real: (
            2 if next(calls) == 1 else real(*args)
        )
        with pytest.raises(Cancelled):
            lease.decode(50)
        ctx.native.decode = real
        assert 2 <= len(lease.sequence) < 6
        if by_hand:
            with pytest.raises(ReprocessNeeded) as caught:
                lease.make_room(1)
            lease.sequence.prefill(caught.value.tokens)
            lease.make_room(1)
            lease.sequence.step(50)
        else:
            lease.decode(50)
        assert lease.sequence.tokens == [20, 21, 26, 27, 28, 29, 50]
        assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, lease.sequence.tokens))
        lease.release()
        cache.check()


def test_a_prompt_whose_sequence_was_emptied_begins_again(tmp_path: Path, ctx: Context) -> None:
    """If the memory cannot roll back, an abort empties it; the whole prompt is decoded again."""
    cache = SlotCache(ctx, 1)
    fill(cache, range(20, 30))
    lease = cache.acquire(range(20, 34))
    assert lease.cached == 10
    lease.sequence.remove()
    lease.decode()
    assert lease.sequence.tokens == list(range(20, 34))
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, lease.sequence.tokens))


def test_a_shared_tail_is_not_shifted(tmp_path: Path, ctx: Context) -> None:
    """Shifting a fork would shift the sibling's positions too, which ollama does not check.

    In every unified release the sibling has wrong logits and lost positions afterwards.
    """
    cache = SlotCache(ctx, 4, keep=2, size=10)
    one = cache.acquire(range(20, 30))
    one.decode()
    other = cache.acquire([*range(20, 29), 50])
    other.decode()
    before = ctx.kv.snapshot().stats.per_sequence[one.sequence.id]
    with pytest.raises(ReprocessNeeded):
        other.make_room(1)
    assert ctx.kv.snapshot().stats.per_sequence[one.sequence.id].cells == before.cells
    assert one.sequence.tokens == list(range(20, 30))
    other.release()
    # The other sequence has no tokens in these cells: now they can be shifted in place.
    one.make_room(1)
    assert one.sequence.tokens == [20, 21, 26, 27, 28, 29]
    again = cache.acquire([20, 21, 26, 27, 28, 29, 5])
    assert again.cached == 2
    again.decode()
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, [20, 21, 26, 27, 28, 29, 5]))
    cache.check()


def test_shifted_tokens_are_not_reused_as_a_prefix(ctx: Context) -> None:
    """Tokens after discarded ones differ from those of a prompt without the discarded ones.

    Ollama treats them as equal, and continues with other keys and values than a new context.
    """
    cache = SlotCache(ctx, 1, keep=2, size=10)
    with cache.acquire(range(20, 30)) as lease:
        lease.decode()
        lease.make_room(1)
        shifted = lease.sequence.tokens
    with cache.acquire([*shifted, 5]) as lease:
        assert lease.cached == 2
        lease.decode()
    assert cache.acquire([*shifted, 5, 6]).cached == 7


@pytest.mark.parametrize("saved", [False, True])
def test_tokens_shifted_by_the_lease_holder_are_not_reused(
    tmp_path: Path, ctx: Context, saved: bool
) -> None:
    """The holder of a lease may shift its sequence: the result is the same."""
    cache = SlotCache(ctx, 1)
    with cache.acquire(range(20, 30)) as lease:
        lease.decode()
        lease.sequence.remove(2, 6)
        lease.sequence.shift(6, None, -4)
        if saved:
            lease.sequence.restore(lease.sequence.save())
    again = cache.acquire([20, 21, 26, 27, 28, 29, 5])
    assert again.cached == 2
    again.decode()
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, [20, 21, 26, 27, 28, 29, 5]))


def test_groups_are_neither_split_nor_half_reused(ctx: Context) -> None:
    """A group is discarded, decoded in one batch, and reused only as a whole."""
    cache = SlotCache(ctx, 2, keep=2, size=32)
    prompt = list(range(20, 50))
    lease = cache.acquire(prompt, groups=[(10, 20), (22, 30)])
    lease.decode()
    lease.decode([7, 8, 9])
    # Half of the tokens that are not kept would end inside the first group.
    assert lease.sequence.tokens == [20, 21, *range(40, 50), 7, 8, 9]
    lease.release()
    with cache.acquire(prompt) as lease:
        lease.decode()
    # All of it is cached, but its last group must be evaluated as a whole.
    with cache.acquire(prompt, groups=[(22, 30)]) as lease:
        assert lease.cached == 22
    with cache.acquire([*prompt[:25], 3], groups=[(22, 26)]) as lease:
        assert lease.cached == 22


def test_long_prompt_is_split_between_token_groups(tmp_path: Path) -> None:
    """A prompt longer than a batch is split between groups."""
    ctx = kit.context(tmp_path, n_batch=8)
    cache = SlotCache(ctx, 2)
    lease = cache.acquire(range(20, 40), groups=[(6, 12), (13, 20)])
    ctx.native.calls.clear()
    lease.decode()
    assert ctx.native.calls == ["decode 6", "decode 7", "decode 7"]
    with pytest.raises(UsageError, match="at most 8 fit"):
        cache.acquire(range(20, 40), groups=[(6, 15)])
