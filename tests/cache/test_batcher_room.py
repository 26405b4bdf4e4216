"""Test which of several prompts wait, are admitted, or fail alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import PROMPTS, Fixed, alone

from pyllamakv.cache.batcher import STARVATION_STEPS, Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    DecodeError,
    KVCacheFull,
    NativeError,
    NoSlotAvailable,
    PromptTooLong,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


def test_a_prompt_that_can_never_fit_is_refused_at_once(ctx: Context) -> None:
    """The limit is the longest sequence of the manager."""
    with PrefixCache(ctx) as cache:
        batcher = Batcher(cache)
        with pytest.raises(PromptTooLong, match="has 257 tokens, and a sequence at most 256"):
            batcher.submit([1] * 257)
        assert batcher.stats().waiting == 0
        batcher.submit([1] * 256, 0).result()
    assert SlotCache(ctx).max_sequence_tokens == 64


def test_failed_request_keeps_the_text_of_others(tmp_path: Path, ctx: Context) -> None:
    """A refused prompt, or a failing sampler, does not change the text of the others."""
    batcher = Batcher(SlotCache(ctx))
    good = batcher.submit("Hi", 8)
    with pytest.raises(PromptTooLong, match="has 65 tokens, and a sequence at most 64"):
        batcher.submit("x" * 64, 8)
    broken = batcher.submit("Ho", 8, sampler=Fixed([70]))
    other = batcher.submit("Hello", 8)
    batcher.run()
    assert [each.finish_reason for each in (good, broken, other)] == [
        "length", "failed", "length",
    ]  # fmt: skip
    with pytest.raises(IndexError):
        broken.result()
    assert broken.text == "C"
    assert good.text == alone(tmp_path, "Hi", 8)
    assert other.text == alone(tmp_path, "Hello", 8)


@pytest.mark.parametrize("failure", [1, -3, NativeError("it threw", code=-1)])
def test_failed_batch_is_decoded_one_by_one(tmp_path: Path, ctx: Context, failure: Any) -> None:
    """The second of three fails alone as well; the others are not affected.

    One that finds no free cells is decoded later.
    """
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    going = [batcher.submit(p, 8) for p in PROMPTS[:3]]
    batcher.step()
    batcher.step()
    ctx.native.fail_next = [failure, 0, failure, 0]
    real = ctx.native.decode

    def decode(*args: Any) -> int:
        # A zero in the list is a successful decode.
        if ctx.native.fail_next and ctx.native.fail_next[0] == 0:
            rest, ctx.native.fail_next = ctx.native.fail_next[1:], []
            try:
                return real(*args)
            finally:
                ctx.native.fail_next = rest
        return real(*args)

    ctx.native.decode = decode
    batcher.run()
    second = "length" if failure == 1 else "failed"
    assert [each.finish_reason for each in going] == ["length", second, "length"]
    if failure == 1:
        assert going[1].text == alone(tmp_path, PROMPTS[1], 8)
    else:
        assert isinstance(going[1].error, DecodeError)
    assert going[0].text == alone(tmp_path, PROMPTS[0], 8)
    assert going[2].text == alone(tmp_path, PROMPTS[2], 8)
    cache.check()


def test_prompt_without_a_slot_waits_for_another_to_end(ctx: Context) -> None:
    """Without a slot, a prompt waits for another one to end; alone it fails."""
    cache = SlotCache(ctx, 1)
    batcher = Batcher(cache)
    lease = cache.acquire([1])
    one = batcher.submit("Hi", 2)
    assert not batcher.step()
    assert isinstance(one.error, NoSlotAvailable)
    lease.release()
    going = [batcher.submit("Hi", 2) for _ in range(3)]
    batcher.step()
    assert (batcher.stats().active, batcher.stats().waiting) == (1, 2)
    batcher.run()
    assert [each.finish_reason for each in going] == ["length"] * 3


def test_a_prompt_waits_for_cells(tmp_path: Path) -> None:
    """If slots share cells, a prompt waits until enough cells are free."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx, size=60)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 40, 6), batcher.submit("y" * 40, 6)
    asked: list[bool] = []
    for name in ("acquire", "resume"):
        real = getattr(cache, name)

        def noted(*args: Any, real: Any = real, **more: Any) -> Any:
            asked.append(one.done or other.done)
            return real(*args, **more)

        setattr(cache, name, noted)
    batcher.run()
    assert (one.finish_reason, other.finish_reason) == ("length", "length")
    assert other.text == alone(tmp_path, "y" * 40, 6)
    # Parked once, and not resumed before cells may be free.
    assert asked == [False, False, True]
    cache.check()


def test_a_request_that_does_not_fit_alone_fails(tmp_path: Path) -> None:
    """It keeps its text, and the other one, which fits, continues."""
    ctx = kit.context(tmp_path, n_ctx=64)
    batcher = Batcher(PrefixCache(ctx))
    long, other = batcher.submit("x" * 28, 100), batcher.submit("y" * 28, 20)
    batcher.run()
    assert isinstance(long.error, KVCacheFull)
    assert len(long.tokens) == 64 - 29 + 1
    assert (other.finish_reason, other.text) == ("length", alone(tmp_path, "y" * 28, 20))


def test_a_prompt_without_cells_evicts_old_histories(tmp_path: Path) -> None:
    """Each prompt fits alone; for both together, histories are evicted."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx, size=60)
    batcher = Batcher(cache)
    batcher.submit("z" * 28, 1).result()
    one, other = batcher.submit([70] * 16, 10), batcher.submit([80] * 16, 10)
    batcher.run()
    assert (one.finish_reason, other.finish_reason) == ("length", "length")
    assert other.text == alone(tmp_path, [80] * 16, 10)
    assert cache.stats().evictions == 1
    cache.check()


@pytest.mark.parametrize("native", [{}, {"can_shift": False}, {"partial": False}])
def test_long_generations_shift_without_affecting_others(tmp_path: Path, native: dict) -> None:
    """A slot is filled many times; tokens that are decoded again do not affect others.

    Ollama put wrong tokens into the batch when it decoded tokens again.
    """
    ctx = kit.context(tmp_path, native)
    cache = SlotCache(ctx, keep=4)
    batcher = Batcher(cache)
    long, short = batcher.submit("Once", 60), batcher.submit("Hi", 12)
    while batcher.step():
        cache.check()
    assert (long.finish_reason, len(long.tokens)) == ("length", 60)
    assert short.text == alone(tmp_path, "Hi", 12, **native)
    assert (cache.stats().reprocessed > 0) is bool(native)
    # The head of the prompt, and the newest decoded tokens are in order.
    held = cache._slots[0].tokens
    expected = [*long.prompt, *long.tokens][:-1]
    assert held[:5] == expected[:5]
    assert held[5:] == expected[5 - len(held) :]


def test_running_generations_get_tokens_during_a_long_prompt(ctx: Context) -> None:
    """Running generations get a token in each step, while prompts share the rest."""
    batcher = Batcher(SlotCache(ctx), n_batch=8)
    one = batcher.submit("H", 30, sampler=Fixed([70] * 40))
    batcher.step()
    long = [batcher.submit("x" * 60, 1), batcher.submit("y" * 60, 1)]
    counts = []
    for _ in range(18):
        batcher.step()
        counts.append(len(one.tokens))
        if not all(each.done for each in long):
            a, b = (0 if each.done else len(each.ledger) for each in long)
            assert abs(a - b) <= 8 or any(each.done for each in long)
    assert counts == list(range(2, 20))
    assert all(each.done for each in long)


def test_waiting_prompts_are_decoded_beside_full_batches(ctx: Context) -> None:
    """If running generations fill every batch, prompts are decoded after some steps."""
    batcher = Batcher(SlotCache(ctx), n_batch=2)
    going = [batcher.submit("H", 60, sampler=Fixed([70] * 60)) for _ in range(2)]
    for _ in range(4):
        batcher.step()
    late = batcher.submit("Hello", 1)
    for _ in range(6 * STARVATION_STEPS):
        batcher.step()
    assert late.done
    assert not any(each.done for each in going)


def test_fragmented_cells_are_moved_together(tmp_path: Path) -> None:
    """If the library does not defragment, the batcher does it once."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    # One token of each, interleaved: no two free cells are adjacent afterwards.
    leases = [cache.acquire([60 + n]) for n in range(4)]
    for token in range(16):
        for each in leases:
            each.sequence.step(60 + token)
    for each in leases:
        each.release()
    one = batcher.submit("x" * 14, 1)
    batcher.run()
    assert (one.finish_reason, one.error) == ("length", None)
    cache.check()
