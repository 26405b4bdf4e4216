"""Test several prompts at once, with a simulated library whose logits show a lost token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import PROMPTS, Fixed, alone, scripted
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime.generated_text import Usage

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


MANAGERS = {
    "longest": lambda ctx: SlotCache(ctx, policy="longest"),
    "best": lambda ctx: SlotCache(ctx, policy="best"),
    "prefixes": PrefixCache,
    "one prefix": lambda ctx: PrefixCache(ctx, entries=1),
}


@pytest.mark.parametrize("n_batch", [32, 7, 3])
@pytest.mark.parametrize("manager", MANAGERS)
def test_batched_prompts_get_the_same_text_as_alone(
    tmp_path: Path, ctx: Context, manager: str, n_batch: int
) -> None:
    """With more prompts than slots, each prompt gets the same text as alone."""
    cache = MANAGERS[manager](ctx)
    with Batcher(cache, n_batch=n_batch) as batcher:
        lengths = [3, 11, 1, 6, 9, 12]
        going = [batcher.submit(p, n) for p, n in zip(PROMPTS, lengths, strict=True)]
        while batcher.step():
            cache.check()
        for each, prompt, n in zip(going, PROMPTS, lengths, strict=True):
            assert each.text == alone(tmp_path, prompt, n)
            assert (each.finish_reason, len(each.tokens)) == ("length", n)
    assert batcher.stats().finished == 6
    assert batcher.stats().generated_tokens == sum(lengths)


def test_greedy_generation_works_without_a_native_sampler(tmp_path: Path) -> None:
    """The greedy choice in Python is the same."""
    without = {"capabilities": ALL & ~Capability.SAMPLER}
    ctx = kit.context(tmp_path, without, n_ctx=256)
    with Batcher(SlotCache(ctx)) as batcher:
        going = [batcher.submit(p, 5) for p in PROMPTS[:3]]
        batcher.run()
        assert [each.text for each in going] == [alone(tmp_path, p, 5) for p in PROMPTS[:3]]


def test_iterating_one_generation_advances_the_others(ctx: Context) -> None:
    """Iterating one advances all; a second iteration starts with the beginning of the text."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", sampler=scripted(b"one two"))
    other = batcher.submit("Ho", sampler=scripted(b"three four"))
    pieces = list(one)
    assert pieces == list("one two")
    assert one.usage == Usage(3, 0, 7)
    assert (one.finish_reason, one.done, other.finish_reason) == ("end", True, None)
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
    """Stop strings and characters split across tokens are both handled."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", stop=stop, sampler=scripted(data))
    pieces = list(one)
    assert ("".join(pieces), one.finish_reason) == (text, reason)
    assert "\ufffd" not in "".join(pieces[:-1])


def test_withheld_stop_prefix_is_returned_at_the_end(ctx: Context) -> None:
    """Withheld bytes are returned as text after the last token."""
    one = Batcher(SlotCache(ctx)).submit("Hi", 5, "two", scripted(b"abctwo"))
    assert (one.result(), one.finish_reason, len(one.tokens)) == ("abctw", "length", 5)


def test_end_token_stops_only_if_configured(ctx: Context) -> None:
    """The end-of-generation token stops, or counts as a token without text."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 4, sampler=Fixed([70, 2, 71, 72, 73]), stop_at_end=False)
    other = batcher.submit("Hi", 4, sampler=Fixed([70, 2, 71, 72, 73]))
    batcher.run()
    assert (one.text, one.tokens, one.finish_reason) == ("CDE", [70, 2, 71, 72], "length")
    assert (other.text, other.tokens, other.finish_reason) == ("C", [70], "end")


def test_the_text_of_a_token_is_kept_whether_ends_stop_or_not(ctx: Context) -> None:
    """They are looked up each time, for generations that they stop."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 4, sampler=Fixed([70, 2, 71, 70]), stop_at_end=False)
    assert (one.result(), batcher.known) == ("CDC", {70: "C", 71: "D"})


def test_request_of_no_tokens_caches_its_prompt(ctx: Context) -> None:
    """A prompt may be decoded for later ones."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 60, 0), batcher.submit("Hi", 3)
    batcher.run()
    assert (one.text, one.finish_reason, other.finish_reason) == ("", "length", "length")
    assert batcher.submit("x" * 60 + "y", 1).result()
    assert cache.stats().reused_tokens == 61


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_prompt_without_text_may_end_with_a_batch_of_one_token(
    tmp_path: Path, ctx: Context, others: int
) -> None:
    """It ends after that token, and the others get their own."""
    with Batcher(PrefixCache(ctx), n_batch=7 + others) as batcher:
        going = [batcher.submit(letter, 90) for letter in "ab"[:others]]
        batcher.step()
        one = batcher.submit([9] * 78, 0)
        batcher.run()
        assert (one.finish_reason, one.tokens) == ("length", [])
        for each, letter in zip(going, "ab", strict=False):
            assert each.text == alone(tmp_path, letter, 90)


def test_invalid_requests_are_refused_without_submission(ctx: Context) -> None:
    """An invalid request submits nothing."""
    batcher = Batcher(SlotCache(ctx))
    for prompt, options in (
        ([], {}),
        ([5, 259], {}),
        ([-1], {}),
        ("x", {"max_tokens": -1}),
        ("x", {"stop": ""}),
        ("x" * 20, {"groups": [(0, 40)]}),
        ("x", {"sampler": 1}),
    ):
        with pytest.raises(UsageError):
            batcher.submit(prompt, **options)
    for n_batch in (0, 33):
        with pytest.raises(UsageError, match="n_batch"):
            Batcher(batcher.manager, n_batch=n_batch)
    assert not batcher.step()


def test_generations_have_separate_samplers(tmp_path: Path, ctx: Context) -> None:
    """There is a sampler per generation; greedy parameters share one."""
    batcher = Batcher(SlotCache(ctx))
    warm = batcher.submit("Hi", 4, sampler=SamplerParams(temperature=0.8, seed=3))
    cold = batcher.submit("Hi", 4, sampler=SamplerParams())
    biased = batcher.submit("Hi", 0, sampler=SamplerParams(logit_bias={70: 1.0}))
    assert biased.sampler is not cold.sampler
    batcher.run()
    assert cold.text == warm.text == alone(tmp_path, "Hi", 4)
    assert ctx.native.freed == ["sampler"] * 2
    batcher.close()
    assert ctx.native.freed == ["sampler"] * 3


def test_sampler_with_history_serves_one_generation(tmp_path: Path) -> None:
    """A sampler with a history is refused while another one runs, a grammar also afterwards."""
    ctx = kit.context(tmp_path, {"capabilities": ALL | Capability.GRAMMAR}, n_ctx=256)
    batcher, model = Batcher(SlotCache(ctx)), ctx.model
    penalties = {"penalty_last_n": 4, "penalty_repeat": 1.1}
    with model.sampler(**penalties) as kept, model.sampler(grammar='root ::= "x"*') as grammar:
        for sampler in (kept, grammar):
            one = batcher.submit("Hi", 4, sampler=sampler)
            with pytest.raises(UsageError, match="history of another generation"):
                batcher.submit("Ho", 4, sampler=sampler)
            assert one.result()
        assert batcher.submit("Ho", 4, sampler=kept).result()
        with pytest.raises(UsageError, match="tokens of another text"):
            batcher.submit("Ho", 4, sampler=grammar)
        grammar.reset()
        assert batcher.submit("Ho", 4, sampler=grammar).result()
    with model.sampler(temperature=0.8) as shared:
        going = [batcher.submit("Hi", 4, sampler=shared) for _ in "ab"]
        batcher.run()
    assert all(one.finish_reason == "length" for one in going)


@pytest.mark.parametrize("lengths", [(20, 3, 5), (3, 20, 5), (3, 5, 20)])
def test_short_prompts_of_a_step_have_text_before_the_longest_is_evaluated(
    ctx: Context, lengths: tuple[int, ...]
) -> None:
    """The order of submission does not matter; a micro-batch has 8 tokens."""
    texts: list[list[int]] = []

    def note() -> None:
        texts.append([len(each.tokens) for each in going])

    with Batcher(SlotCache(ctx), on_text=note) as batcher:
        going = [batcher.submit([70 + i] * n, 2) for i, n in enumerate(lengths)]
        batcher.step()
    assert texts == [[int(n < 20) for n in lengths]] * 3


def test_groups_are_decoded_in_one_batch(ctx: Context) -> None:
    """Pieces of a prompt end between groups, also beside other prompts."""
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
    # The group of eight needs a separate batch: it is decoded first after it has waited.
    assert {0, 6, 14} >= {n for n in lengths if n <= 14}
    assert one.done or len(one.tokens) > 8


def test_stop_strings_need_text(ctx: Context) -> None:
    """A model without a vocabulary gives tokens, and no text."""
    import dataclasses

    ctx.model.info = dataclasses.replace(ctx.model.info, has_vocab=False)
    batcher = Batcher(SlotCache(ctx))
    with pytest.raises(Unsupported):
        batcher.submit([5, 6], 3, stop="x")
    one = batcher.submit([5, 6], 3)
    batcher.run()
    assert (one.text, len(one.tokens)) == ("", 3)


def test_chat_messages_are_rendered_with_the_template(tmp_path: Path) -> None:
    """They are rendered with the model's template, and tokenized without a first token."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools }}"
    ctx = kit.context(tmp_path, {"meta": {"tokenizer.chat_template": template}}, n_ctx=256)
    batcher = Batcher(SlotCache(ctx))
    messages = [{"role": "user", "content": "Hi"}]
    made = batcher.submit(messages=messages, max_tokens=3)
    assert made.prompt == ctx.model.tokenize("user:Hi;None", add_special=False)
    assert len(made.result()) == 3
    made = batcher.submit(messages=messages, tools=[{"a": 1}])
    assert made.prompt == ctx.model.tokenize("user:Hi;[{'a': 1}]", add_special=False)
    for wrong in ({}, {"prompt": "x", "messages": messages}, {"prompt": "x", "tools": []}):
        with pytest.raises(UsageError, match="either a prompt or messages"):
            batcher.submit(**wrong)
    with pytest.raises(UsageError, match=r"messages\[0\] has no 'role'"):
        batcher.submit(messages=[{}])
    for wrong in (messages, messages[0], iter(messages)):
        with pytest.raises(TypeError, match=r"\(pass a chat as messages=\), not"):
            batcher.submit(wrong)
