"""Several prompts at once, over a simulated library whose logits show every lost token."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.cache.batching import feeding
from pyllamakv.cache.batching.batcher import Batcher
from pyllamakv.cache.prefixes.cache import PrefixCache
from pyllamakv.cache.slots.cache import SlotCache
from pyllamakv.errors import (
    Closed,
    DecodeError,
    KVCacheFull,
    NativeError,
    NoSlotAvailable,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


class Fixed:
    """Pick tokens from a list."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def pick(self, context: Context, index: int = -1) -> int:
        """Return the next of the list, once the logits may be read."""
        context.logits(index)
        return self.tokens.pop(0)


def said(data: bytes) -> Fixed:
    """Return a sampler that says these bytes, and then ends."""
    return Fixed([*(byte + 3 for byte in data), 2])


def alone(folder: Path, prompt: str | list[int], n: int, **native: Any) -> str:
    """Return what a prompt gives in a context of its own, by the runtime's own loop."""
    ctx = kit.context(folder, native, n_ctx=256)
    sequence = ctx.sequence()
    ctx.prefill(sequence, ctx.model.tokenize(prompt) if isinstance(prompt, str) else prompt)
    return "".join(ctx.generate(sequence, n))


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


PROMPTS = ["Hi", "Once upon a time there was", "Hello", "x" * 50, "Once upon a hill", "y" * 40]


MANAGERS = {
    "longest": lambda ctx: SlotCache(ctx, policy="longest"),
    "best": lambda ctx: SlotCache(ctx, policy="best"),
    "prefixes": PrefixCache,
    "one prefix": lambda ctx: PrefixCache(ctx, entries=1),
}


@pytest.mark.parametrize("n_batch", [32, 7, 3])
@pytest.mark.parametrize("manager", MANAGERS)
def test_together_is_as_alone(tmp_path: Path, ctx: Context, manager: str, n_batch: int) -> None:
    """More prompts than slots, of any length, in any batch: each says what it says alone."""
    cache = MANAGERS[manager](ctx)
    with Batcher(cache, n_batch=n_batch) as batcher:
        lengths = [3, 11, 1, 6, 9, 12]
        going = [batcher.submit(p, n) for p, n in zip(PROMPTS, lengths, strict=True)]
        while batcher.step():
            cache.check()
        for each, prompt, n in zip(going, PROMPTS, lengths, strict=True):
            assert each.text == alone(tmp_path, prompt, n)
            assert (each.reason, len(each.tokens)) == ("length", n)
    assert batcher.stats().finished == 6
    assert batcher.stats().chosen_tokens == sum(lengths)


def test_without_a_sampler_in_c(tmp_path: Path) -> None:
    """The greedy choice is the same in Python."""
    without = {"capabilities": ALL & ~Capability.SAMPLER}
    ctx = kit.context(tmp_path, without, n_ctx=256)
    with Batcher(SlotCache(ctx)) as batcher:
        going = [batcher.submit(p, 5) for p in PROMPTS[:3]]
        batcher.run()
        assert [each.text for each in going] == [alone(tmp_path, p, 5) for p in PROMPTS[:3]]


def test_text_streams_and_others_go_on_meanwhile(ctx: Context) -> None:
    """Iterating drives all; a second iteration begins with the text from its beginning."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", sampler=said(b"one two"))
    other = batcher.submit("Ho", sampler=said(b"three four"))
    pieces = list(one)
    assert pieces == list("one two")
    assert (one.reason, one.done, other.reason) == ("end", True, None)
    assert other.text == "three fo"
    assert other.result() == "three four"
    assert "".join(one) == "one two"
    assert repr(other) == "<Generation of 3 + 10 tokens, end>"


@pytest.mark.parametrize(
    ("data", "stop", "text", "reason"),
    [
        (b"one two three", "two", "one ", "stop"),
        (b"one two three", ["x", "wo t"], "one t", "stop"),
        (b"one tw", "two", "one tw", "end"),
        ("gr\u00fcn \u20ac 5".encode(), "\u20ac", "gr\u00fcn ", "stop"),
        ("gr\u00fcn \U0001f600!".encode(), (), "gr\u00fcn \U0001f600!", "end"),
        (b"ab\xe2\x82", "z", "ab\ufffd", "end"),
    ],
)
def test_text_ends_before_stop_strings(
    ctx: Context, data: bytes, stop: Any, text: str, reason: str
) -> None:
    """Stop strings cut by tokens, characters cut by tokens, and both."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", stop=stop, sampler=said(data))
    pieces = list(one)
    assert ("".join(pieces), one.reason) == (text, reason)
    assert "\ufffd" not in "".join(pieces[:-1])


def test_half_a_stop_string_comes_out_at_the_end(ctx: Context) -> None:
    """What was held back is text, when no more tokens are wanted."""
    one = Batcher(SlotCache(ctx)).submit("Hi", 5, "two", said(b"abctwo"))
    assert (one.result(), one.reason, len(one.tokens)) == ("abctw", "length", 5)


def test_an_end_is_said_when_it_shall_be(ctx: Context) -> None:
    """The end-of-generation token stops, or counts as one that says nothing."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 4, sampler=Fixed([70, 2, 71, 72, 73]), stop_at_end=False)
    other = batcher.submit("Hi", 4, sampler=Fixed([70, 2, 71, 72, 73]))
    batcher.run()
    assert (one.text, one.tokens, one.reason) == ("CDE", [70, 2, 71, 72], "length")
    assert (other.text, other.tokens, other.reason) == ("C", [70], "end")


def test_no_tokens_wanted_leaves_the_prompt_in_the_cache(ctx: Context) -> None:
    """A prompt may be decoded for those that come later."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 60, 0), batcher.submit("Hi", 3)
    batcher.run()
    assert (one.text, one.reason, other.reason) == ("", "length", "length")
    assert batcher.submit("x" * 60 + "y", 1).result()
    assert cache.stats().cached_tokens == 61


def test_bad_requests_are_refused(ctx: Context) -> None:
    """Nothing is submitted then."""
    batcher = Batcher(SlotCache(ctx))
    for prompt, options in (
        ([], {}),
        ([5, 259], {}),
        ([-1], {}),
        ("x", {"max_tokens": -1}),
        ("x", {"stop": ""}),
        ("x" * 20, {"groups": [(0, 40)]}),
        ("x", {"sampler": SamplerParams(seed=-1, temperature=1)}),
    ):
        with pytest.raises(UsageError):
            batcher.submit(prompt, **options)
    for n_batch in (0, 33):
        with pytest.raises(UsageError, match="n_batch"):
            Batcher(batcher.manager, n_batch=n_batch)
    assert not batcher.step()


def test_samplers_of_their_own(tmp_path: Path, ctx: Context) -> None:
    """A sampler per generation; greedy parameters are the shared one."""
    batcher = Batcher(SlotCache(ctx))
    warm = batcher.submit("Hi", 4, sampler=SamplerParams(temperature=0.8, seed=3))
    cold = batcher.submit("Hi", 4, sampler=SamplerParams())
    batcher.run()
    assert cold.text == warm.text == alone(tmp_path, "Hi", 4)
    assert ctx.native.freed == ["sampler"]
    batcher.close()
    assert ctx.native.freed == ["sampler", "sampler"]


def test_one_failure_is_alone(tmp_path: Path, ctx: Context) -> None:
    """A prompt that is too long, and a sampler that breaks; the others say what they say alone."""
    batcher = Batcher(SlotCache(ctx))
    good = batcher.submit("Hi", 8)
    long = batcher.submit("x" * 64, 8)
    broken = batcher.submit("Ho", 8, sampler=Fixed([70]))
    other = batcher.submit("Hello", 8)
    batcher.run()
    assert [each.reason for each in (good, long, broken, other)] == [
        "length", "failed", "failed", "length",
    ]  # fmt: skip
    assert isinstance(long.error, UsageError)
    with pytest.raises(UsageError, match="65 tokens and a slot 64"):
        long.result()
    with pytest.raises(IndexError):
        broken.result()
    assert broken.text == "C"
    assert good.text == alone(tmp_path, "Hi", 8)
    assert other.text == alone(tmp_path, "Hello", 8)


@pytest.mark.parametrize("failure", [1, -3, NativeError("it threw", code=-1)])
def test_a_decode_that_fails_is_tried_one_by_one(
    tmp_path: Path, ctx: Context, failure: Any
) -> None:
    """The second of three fails alone as well; the others do not notice."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    going = [batcher.submit(p, 8) for p in PROMPTS[:3]]
    batcher.step()
    batcher.step()
    ctx.native.fail_next = [failure, 0, failure, 0]
    real = ctx.native.decode

    def decode(*args: Any) -> int:
        # A zero in the list stands for a decode that is done.
        if ctx.native.fail_next and ctx.native.fail_next[0] == 0:
            rest, ctx.native.fail_next = ctx.native.fail_next[1:], []
            try:
                return real(*args)
            finally:
                ctx.native.fail_next = rest
        return real(*args)

    ctx.native.decode = decode
    batcher.run()
    assert [each.reason for each in going] == ["length", "failed", "length"]
    assert isinstance(going[1].error, DecodeError)
    assert going[0].text == alone(tmp_path, PROMPTS[0], 8)
    assert going[2].text == alone(tmp_path, PROMPTS[2], 8)
    cache.check()


def test_waiting_for_a_slot(ctx: Context) -> None:
    """Who finds none waits for another to end; alone it fails."""
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
    assert [each.reason for each in going] == ["length"] * 3


def test_a_prompt_waits_for_cells(tmp_path: Path) -> None:
    """Where slots lend each other cells, a prompt without room begins when there is some."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx, size=60)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 40, 6), batcher.submit("y" * 40, 6)
    asked, real = [], cache.acquire
    cache.acquire = lambda *args, **more: (
        asked.append(one.done or other.done) or real(*args, **more)
    )
    batcher.run()
    assert (one.reason, other.reason) == ("length", "length")
    assert other.text == alone(tmp_path, "y" * 40, 6)
    # Set back once, and not asked again before there can be room.
    assert asked == [False, False, True]
    cache.check()


def test_text_that_finds_no_room_fails(tmp_path: Path) -> None:
    """What was said stays, and the other goes on."""
    ctx = kit.context(tmp_path, n_ctx=64)
    batcher = Batcher(SlotCache(ctx, size=60))
    one, other = batcher.submit("x" * 28, 100), batcher.submit("y" * 28, 100)
    batcher.run()
    failed, rest = sorted((one, other), key=lambda each: each.reason != "failed")
    assert isinstance(failed.error, KVCacheFull)
    assert len(failed.tokens) > 2
    assert (rest.reason, len(rest.tokens)) == ("length", 100)


def test_who_finds_no_cells_beside_others_gets_those_of_old_histories(tmp_path: Path) -> None:
    """Room is made for each alone; together they need more, and histories make way for it."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx, size=60)
    batcher = Batcher(cache)
    batcher.submit("z" * 28, 1).result()
    one, other = batcher.submit([70] * 16, 10), batcher.submit([80] * 16, 10)
    batcher.run()
    assert (one.reason, other.reason) == ("length", "length")
    assert other.text == alone(tmp_path, [80] * 16, 10)
    assert cache.stats().evictions == 1
    cache.check()


@pytest.mark.parametrize("native", [{}, {"can_shift": False}, {"partial": False}])
def test_long_generations_shift(tmp_path: Path, native: dict) -> None:
    """A slot is filled many times over; others are not disturbed by what is decoded again.

    The original filled the batch with the wrong tokens when it had to decode again.
    """
    ctx = kit.context(tmp_path, native)
    cache = SlotCache(ctx, keep=4)
    batcher = Batcher(cache)
    long, short = batcher.submit("Once", 60), batcher.submit("Hi", 12)
    while batcher.step():
        cache.check()
    assert (long.reason, len(long.tokens)) == ("length", 60)
    assert short.text == alone(tmp_path, "Hi", 12, **native)
    assert (cache.stats().reprocessed > 0) is bool(native)
    # The head of the prompt, and the newest that was decoded: nothing between the two is mixed up.
    held = cache._slots[0].tokens
    said = [*long.prompt, *long.tokens][:-1]
    assert held[:5] == said[:5]
    assert held[5:] == said[5 - len(held) :]


def test_cancel_between_steps(ctx: Context) -> None:
    """What was said stays, the slot is free, and the others go on."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("Hi", 20), batcher.submit("Ho", 20)
    waiting = batcher.submit("Hu", 20)
    for _ in range(5):
        batcher.step()
    one.cancel()
    waiting.cancel()
    batcher.run()
    assert (one.reason, len(one.tokens)) == ("cancelled", 5)
    assert (other.reason, len(other.tokens)) == ("length", 20)
    assert waiting.reason == "cancelled"
    assert one.result() == one.text
    one.cancel()
    # The tokens that were decoded are there for who asks again.
    again = batcher.submit([*one.prompt, *one.tokens, 70], 1)
    again.result()
    assert again.cached == len(one.prompt) + 4
    assert batcher.stats().cancelled == 2


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("whole", [False, True])
def test_cancel_inside_a_decode(ctx: Context, whole: bool) -> None:
    """From another thread: a generation's cancel ends it alone, the context's all of them."""
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
    assert one.reason == "cancelled"
    # What was decoded before is kept, what was being decoded is not.
    assert before == len(cache._slots[0].tokens) == 32
    assert other.reason == ("cancelled" if whole else "length")
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


def test_nobody_waits_for_a_long_prompt(ctx: Context) -> None:
    """Who is being continued gets a token in each step, while prompts share the rest."""
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


def test_prompts_do_not_starve(ctx: Context) -> None:
    """When those that are continued fill every batch, prompts come in after some steps."""
    batcher = Batcher(SlotCache(ctx), n_batch=2)
    going = [batcher.submit("H", 60, sampler=Fixed([70] * 60)) for _ in range(2)]
    for _ in range(4):
        batcher.step()
    late = batcher.submit("Hello", 1)
    for _ in range(6 * feeding.PATIENCE):
        batcher.step()
    assert late.done
    assert not any(each.done for each in going)


def test_groups_are_decoded_in_one_batch(ctx: Context) -> None:
    """Pieces of a prompt end between groups, also beside others."""
    batcher = Batcher(SlotCache(ctx), n_batch=8)
    one = batcher.submit("a", 12, sampler=Fixed([70] * 20))
    batcher.step()
    other = batcher.submit(range(20, 40), 1, groups=[(0, 6), (6, 14)])
    lengths = []
    for _ in range(14):
        batcher.step()
        if not other.done:
            lengths.append(len(other.ledger))
    assert other.done
    # The group of eight needs a batch of its own: it goes first once it has waited long enough.
    assert {0, 6, 14} >= {n for n in lengths if n <= 14}
    assert one.done or len(one.tokens) > 8


def test_the_end_of_the_context_ends_all(ctx: Context) -> None:
    """What cannot go on says why."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 5)
    batcher.step()
    ctx.close()
    with pytest.raises(Closed):
        batcher.step()
    assert (one.reason, type(one.error)) == ("failed", Closed)


def test_close_cancels(ctx: Context) -> None:
    """The manager and what it holds stay."""
    cache = SlotCache(ctx)
    with Batcher(cache) as batcher:
        one = batcher.submit("Hi", 5)
        batcher.step()
    assert one.reason == "cancelled"
    assert cache.stats().in_use == 0
    assert cache.stats().tokens == 3
    assert batcher.stats().to_json()["cancelled"] == 1


def test_stop_strings_need_text(ctx: Context) -> None:
    """A model without vocabulary gives tokens, and no text."""
    import dataclasses

    ctx.model.info = dataclasses.replace(ctx.model.info, has_vocab=False)
    batcher = Batcher(SlotCache(ctx))
    with pytest.raises(Unsupported):
        batcher.submit([5, 6], 3, stop="x")
    one = batcher.submit([5, 6], 3)
    batcher.run()
    assert (one.text, len(one.tokens)) == ("", 3)


def test_fragmented_cells_are_moved_together(tmp_path: Path) -> None:
    """A library that does not heal itself is helped once, by a defragmentation."""
    ctx = kit.context(tmp_path, n_ctx=64)
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    # One token of each in turn: no two free cells lie together afterwards.
    leases = [cache.acquire([60 + n]) for n in range(4)]
    for token in range(16):
        for each in leases:
            ctx.step(each.sequence, 60 + token)
    for each in leases:
        each.release()
    one = batcher.submit("x" * 14, 1)
    batcher.run()
    assert (one.reason, one.error) == ("length", None)
    cache.check()


def test_an_interrupt_between_decode_and_choice_loses_nothing(tmp_path: Path, ctx: Context) -> None:
    """Whoever catches it goes on, and gets what each prompt gives alone."""
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
def test_an_exception_while_a_lease_is_given_back_ends_nobody_else(ctx: Context, n: int) -> None:
    """What has ended is struck out with the next step, and its sequence is not touched again."""
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
    assert (one.reason, other.reason, batcher.stats().finished) == ("length", "length", 2)
    assert lease.sequence.tokens == kept
    cache.check()


@pytest.mark.parametrize("when", [1, 4])
def test_a_cancel_while_a_token_is_chosen(ctx: Context, when: int) -> None:
    """Whenever it comes, the next step ends it."""
    batcher = Batcher(SlotCache(ctx))

    class Leaving(Fixed):
        def pick(self, context: Context, index: int = -1) -> int:
            if len(self.tokens) == 21 - when:
                one.cancel()
            return super().pick(context, index)

    one = batcher.submit("Hi", 20, sampler=Leaving([70] * 20))
    other = batcher.submit("Ho", 6)
    batcher.run()
    assert (one.reason, len(one.tokens)) == ("cancelled", when)
    assert other.reason == "length"


def test_a_cancel_while_waiting(ctx: Context) -> None:
    """Who has no slot yet is gone with the next step; the one at work does not notice."""
    batcher = Batcher(SlotCache(ctx, 1))
    one, waiting = batcher.submit("Hi", 12), batcher.submit("Ho", 12)
    for _ in range(4):
        batcher.step()
    waiting.cancel()
    batcher.step()
    assert (waiting.reason, one.reason, len(one.tokens)) == ("cancelled", None, 5)
    batcher.run()
    assert one.reason == "length"
