"""Test several prompts at once that are cancelled, interrupted and closed at any time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import Fixed, alone

from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Cancelled, Closed

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


def test_cancel_between_steps_frees_only_its_slot(ctx: Context) -> None:
    """A cancelled request keeps its text and frees its slot; the others continue."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("Hi", 20), batcher.submit("Ho", 20)
    waiting = batcher.submit("Hu", 20)
    for _ in range(5):
        batcher.step()
    one.cancel()
    waiting.cancel()
    batcher.run()
    assert (one.finish_reason, len(one.tokens)) == ("cancelled", 5)
    assert (other.finish_reason, len(other.tokens)) == ("length", 20)
    assert waiting.finish_reason == "cancelled"
    with pytest.raises(Cancelled, match="after 5 tokens") as caught:
        one.result()
    assert caught.value.text == one.text != ""
    one.cancel()
    # The decoded tokens are reused by the next request.
    again = batcher.submit([*one.prompt, *one.tokens, 70], 1)
    again.result()
    assert again.cached == len(one.prompt) + 4
    stats = batcher.stats()
    assert (stats.finished, stats.cancelled, stats.failed) == (2, 2, 0)


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("whole", [False, True])
def test_cancel_during_a_decode_ends_its_generations(ctx: Context, whole: bool) -> None:
    """From another thread: a generation's cancel ends only it, the context's all of them."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 60, 5), batcher.submit("Ho", 5)
    batcher.step()
    ctx.native.gate.clear()
    ctx.native.entered.clear()
    thread = in_thread(batcher.run)
    assert ctx.native.entered.wait(120)
    before = len(one.sequence)
    ctx.cancel() if whole else one.cancel()
    ctx.native.gate.set()
    thread.join(120)
    assert not thread.is_alive()
    assert one.finish_reason == "cancelled"
    # Tokens decoded before are kept, those of the cancelled decode are not.
    assert before == len(cache._slots[0].tokens) == 32
    assert other.finish_reason == ("cancelled" if whole else "length")
    cache.check()
    later = batcher.submit("x" * 60, 2)
    later.result()
    assert later.cached == 32


def test_a_cancel_before_is_none_of_ours(ctx: Context) -> None:
    """A cancel of something else does not end what is submitted later."""
    batcher = Batcher(SlotCache(ctx))
    ctx.cancel()
    ctx.native._get(ctx.handle).cancelled = False
    assert len(batcher.submit("Hi", 3).result()) == 3


def test_closed_context_fails_every_request(ctx: Context) -> None:
    """A request that cannot continue has the reason in its result."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 5)
    batcher.step()
    ctx.close()
    with pytest.raises(Closed):
        batcher.step()
    assert (one.finish_reason, type(one.error)) == ("failed", Closed)


def test_close_cancels_generations_and_keeps_the_manager(ctx: Context) -> None:
    """The manager and its cached tokens remain."""
    cache = SlotCache(ctx)
    with Batcher(cache) as batcher:
        one = batcher.submit("Hi", 5)
        batcher.step()
    assert one.finish_reason == "cancelled"
    assert cache.stats().in_use == 0
    assert cache.stats().tokens == 3
    assert batcher.stats().to_json()["cancelled"] == 1


def test_an_interrupt_between_decode_and_choice_loses_nothing(tmp_path: Path, ctx: Context) -> None:
    """After the exception, the loop continues, and each prompt gets the same text as alone."""
    batcher = Batcher(SlotCache(ctx))
    one, other = batcher.submit("Hi", 8), batcher.submit("Hello", 8)
    real = ctx.native.sample_all

    def interrupted(*args: Any) -> list[int]:
        ctx.native.sample_all = real
        raise KeyboardInterrupt

    for _ in range(3):
        batcher.step()
        ctx.native.sample_all = interrupted
        with pytest.raises(KeyboardInterrupt):
            batcher.step()
    batcher.run()
    assert one.text == alone(tmp_path, "Hi", 8)
    assert other.text == alone(tmp_path, "Hello", 8)


@pytest.mark.parametrize("n", [2, 4])
def test_an_exception_during_a_release_ends_one_generation_only(ctx: Context, n: int) -> None:
    """The next step removes the ended one, and does not access its sequence again."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("Hi", n), batcher.submit("Hello", 8)
    batcher.step()
    lease = one.lease
    assert lease is not None
    real = lease.release

    def interrupted() -> None:
        real()
        raise KeyboardInterrupt

    lease.release = interrupted
    with pytest.raises(KeyboardInterrupt):
        batcher.run()
    kept = lease.sequence.tokens
    batcher.run()
    assert (one.finish_reason, other.finish_reason, batcher.stats().finished) == (
        "length",
        "length",
        2,
    )
    assert lease.sequence.tokens == kept
    cache.check()


@pytest.mark.parametrize("when", [1, 4])
def test_cancel_during_sampling_ends_the_next_step(ctx: Context, when: int) -> None:
    """The next step ends it at any time."""
    batcher = Batcher(SlotCache(ctx))

    class Leaving(Fixed):
        def sample(self, context: Context, index: int = -1) -> int:
            if len(self.tokens) == 21 - when:
                one.cancel()
            return super().sample(context, index)

    one = batcher.submit("Hi", 20, sampler=Leaving([70] * 20))
    other = batcher.submit("Ho", 6)
    batcher.run()
    assert (one.finish_reason, len(one.tokens)) == ("cancelled", when)
    assert other.finish_reason == "length"


def test_cancelled_waiting_request_ends_at_the_next_step(ctx: Context) -> None:
    """A cancelled request without a slot ends at the next step; the running one is unaffected."""
    batcher = Batcher(SlotCache(ctx, 1))
    one, waiting = batcher.submit("Hi", 12), batcher.submit("Ho", 12)
    for _ in range(4):
        batcher.step()
    waiting.cancel()
    batcher.step()
    assert (waiting.finish_reason, one.finish_reason, len(one.tokens)) == ("cancelled", None, 5)
    batcher.run()
    assert one.finish_reason == "length"
