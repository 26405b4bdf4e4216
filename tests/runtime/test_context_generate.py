"""Generation continues at the end of a sequence, and keeps its tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import Cancelled, NoKVSlot, Unsupported, UsageError
from pyllamakv.runtime.generated_text import Usage
from pyllamakv.runtime.sampler import NumpySampler

if TYPE_CHECKING:
    from pathlib import Path


class Fixed:
    """Sample tokens from a list."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def sample(self, context, index: int = -1) -> int:
        """Return the next token of the list; requires readable logits."""
        context.logits(index)
        return self.tokens.pop(0)


def test_yielded_tokens_are_in_the_sequence(tmp_path: Path) -> None:
    """Check text, tokens and cells."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed(a.context.model.tokenize("Hi")))
    text = "".join(a.generate(max_tokens=10))
    assert a.text == "Hi" + text
    assert len(a) == 13
    assert a.pos_max == 12


def test_resumed_generation_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Check that parts of a generation join, also after an early end of the loop."""
    whole, parts = kit.context(tmp_path), kit.context(tmp_path)
    a, b = whole.sequence(), parts.sequence()
    whole.decode(a.feed(a.context.model.tokenize("Hi")))
    parts.decode(b.feed(b.context.model.tokenize("Hi")))
    expected = "".join(a.generate(max_tokens=12))
    text = "".join(b.generate(max_tokens=4))
    for piece in b.generate(max_tokens=5):
        text += piece
        break
    text += "".join(b.generate(max_tokens=12 - len(text)))
    assert text == expected
    assert a.tokens == b.tokens


def test_two_sequences_generate_in_turn(tmp_path: Path) -> None:
    """Check that decodes of the other sequence between two tokens change nothing."""
    ctx, alone = kit.context(tmp_path), kit.context(tmp_path)
    sequences = [ctx.sequence(), ctx.sequence()]
    prompts = [ctx.model.tokenize(text) for text in ("abc", "xy")]
    ctx.decode([each.feed(prompt) for each, prompt in zip(sequences, prompts, strict=True)])
    turns = zip(*(each.generate(max_tokens=8) for each in sequences), strict=True)
    texts = ["".join(pieces) for pieces in zip(*turns, strict=True)]
    for text, prompt in zip(texts, ("abc", "xy"), strict=True):
        single = alone.sequence()
        alone.decode(single.feed(alone.model.tokenize(prompt)))
        assert "".join(single.generate(max_tokens=8)) == text


def test_the_end_token_ends_and_is_not_kept(tmp_path: Path) -> None:
    """Check both values of the option."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed([5]))
    assert "".join(a.generate(9, Fixed([100, 101, 2, 102]))) == "ab"
    assert a.tokens == [5, 100, 101]
    tokens = Fixed([100, 2, 101])
    assert "".join(a.generate(3, tokens, stop_at_end=False)) == "ab"
    assert a.tokens[-3:] == [100, 2, 101]


def test_characters_are_yielded_whole(tmp_path: Path) -> None:
    """Check a character of four bytes, and one that never ends."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed([5]))
    smile = [byte + 3 for byte in "😀".encode()]
    assert list(a.generate(4, Fixed(smile))) == ["😀"]
    assert list(a.generate(2, Fixed(smile))) == ["\ufffd"]


def test_numpy_sampler_generates_the_same_greedy_tokens(tmp_path: Path) -> None:
    """Check that both ways choose the same greedy tokens."""
    texts = []
    for capabilities in (ALL, ALL & ~Capability.SAMPLER):
        ctx = kit.context(tmp_path, {"capabilities": capabilities})
        a = ctx.sequence()
        ctx.decode(a.feed(a.context.model.tokenize("same")))
        texts.append("".join(a.generate(10)))
        assert ctx.native.freed.count("sampler") == (1 if capabilities == ALL else 0)
    assert texts[0] == texts[1]


def test_one_seed_gives_one_text(tmp_path: Path) -> None:
    """Check that sampling repeats itself for equal seeds only."""

    def text(seed: int) -> list[int]:
        ctx = kit.context(tmp_path)
        a = ctx.sequence()
        ctx.decode(a.feed(a.context.model.tokenize("same")))
        list(a.generate(20, NumpySampler(SamplerParams(seed=seed, temperature=1.5))))
        return a.tokens

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_failed_generation_keeps_the_yielded_tokens(tmp_path: Path) -> None:
    """Check a cache that becomes full, and a cancel."""
    ctx = kit.context(tmp_path, n_ctx=8)
    a = ctx.sequence()
    ctx.decode(a.feed([5, 5, 5]))
    text = ""
    with pytest.raises(NoKVSlot):
        for piece in a.generate():
            text += piece
    assert len(a) == 8
    assert len(text) == 4 or len(text) == 5
    a.trim(3)
    generating = a.generate()
    next(generating)
    ctx.cancel()
    with pytest.raises(Cancelled):
        next(generating)


def test_the_reason_tokens_text_and_usage_follow_the_iteration(tmp_path: Path) -> None:
    """Check each reason, a character that never ends, and a stop string across tokens."""
    for chosen, options, reason, text, n in (
        ([100, 101, 102], {"max_tokens": 3}, "length", "abc", 3),
        ([100, 101, 2], {}, "end", "ab", 2),
        ([100, 101, 102, 103], {"stop": "bc"}, "stop", "a", 3),
        ([100, 101, 2], {"stop": "bc"}, "end", "ab", 2),
        ([100, 0xF0 + 3], {"max_tokens": 2}, "length", "a\ufffd", 2),
        ([], {"max_tokens": 0}, "length", "", 0),
    ):
        ctx = kit.context(tmp_path)
        a = ctx.sequence()
        ctx.decode(a.feed([5, 6, 7]))
        stream = a.generate(sampler=Fixed(chosen), **options)
        assert (stream.finish_reason, stream.tokens, stream.text) == (None, [], "")
        pieces = list(stream)
        assert ("".join(pieces), stream.text, stream.finish_reason) == (text, text, reason)
        assert (stream.tokens, stream.usage) == (chosen[:n], Usage(3, 3, n))
        assert a.tokens == [5, 6, 7, *chosen[:n]]
        assert list(stream) == []
        assert f"3 + {n} tokens, {reason}" in repr(stream)


def test_failed_or_abandoned_stream_reports_its_reason(tmp_path: Path) -> None:
    """Check a full cache, a cancel and a close, and that an unreferenced stream ends at once."""
    ctx = kit.context(tmp_path, n_ctx=8)
    a = ctx.sequence()
    ctx.decode(a.feed([5, 5, 5]))
    stream = a.generate()
    with pytest.raises(NoKVSlot) as raised:
        list(stream)
    assert (stream.finish_reason, stream.error) == ("failed", raised.value)
    assert (len(stream.tokens), stream.usage) == (5, Usage(3, 3, 5))
    a.trim(3)
    stream = a.generate()
    next(stream)
    ctx.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert stream.finish_reason == "cancelled"
    a.trim(3)
    stream = a.generate()
    next(stream)
    stream.close()
    assert (stream.finish_reason, stream.error, list(stream)) == ("cancelled", None, [])
    freed = ctx.native.freed.count("sampler")
    for _ in a.generate():
        break
    assert ctx.native.freed.count("sampler") == freed + 1


def test_stop_strings_need_a_vocabulary(tmp_path: Path) -> None:
    """Without one, tokens are generated, and stop strings are refused."""
    ctx = kit.context(tmp_path)
    ctx.model.info = dataclasses.replace(ctx.model.info, has_vocab=False)
    a = ctx.sequence()
    ctx.decode(a.feed([5]))
    with pytest.raises(Unsupported, match="stop strings need text"):
        a.generate(stop="x")
    stream = a.generate(3)
    assert (list(stream), len(stream.tokens)) == ([], 3)


def test_empty_sequence_or_negative_limit_is_refused_at_once(tmp_path: Path) -> None:
    """Check an empty sequence and a negative number, before the first text is requested."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    with pytest.raises(UsageError, match="no tokens"):
        a.generate()
    a.step(5)
    with pytest.raises(UsageError, match="max_tokens"):
        a.generate(-1)
    assert list(a.generate(0)) == []
    for sampler in (None, NumpySampler()):
        generating = a.generate(5, sampler)
        a.remove()
        with pytest.raises(UsageError, match="was emptied"):
            next(generating)
        a.step(5)


def spell(text: str) -> Fixed:
    """Return a sampler that generates a text, then an end token."""
    return Fixed([*(byte + 3 for byte in text.encode()), 2])


@pytest.mark.parametrize("stop", ["two", ["three", "two"]])
def test_a_stop_string_ends_the_text(tmp_path: Path, stop: str | list[str]) -> None:
    """Its tokens are in the sequence, its text is not yielded, and no token is sampled after it."""
    ctx = kit.context(tmp_path)
    a, sampler = ctx.sequence(), spell("one two three")
    ctx.decode(a.feed(a.context.model.tokenize("Hi")))
    assert "".join(a.generate(sampler=sampler, stop=stop)) == "one "
    assert a.text == "Hione two"
    assert len(sampler.tokens) == len(" three") + 1


def test_withheld_text_comes_at_the_end(tmp_path: Path) -> None:
    """A text that only begins like a stop string is yielded."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed(a.context.model.tokenize("Hi")))
    assert "".join(a.generate(sampler=spell("one t"), stop="two")) == "one t"
    with pytest.raises(UsageError, match="stop string"):
        a.generate(stop="")


@pytest.mark.parametrize("kind", ["C", "numpy"])
def test_a_sampler_continues_after_an_early_end(tmp_path: Path, kind: str) -> None:
    """A token that was sampled and not decoded is in its history: it is the next one."""

    def tokens(cuts: int, fails: bool = False, other: bool = False) -> list[int]:
        ctx = kit.context(tmp_path)
        a, b = ctx.sequence(), ctx.sequence()
        ctx.decode(a.feed(a.context.model.tokenize("Hi")))
        params = {"temperature": 1.0, "seed": 3, "penalty_last_n": 8, "penalty_repeat": 3.0}
        sampler = numpy = NumpySampler(SamplerParams(**params))
        if kind == "C":
            sampler = ctx.model.sampler(processors=[lambda tokens, logits: None])
            ctx.native.sample_logits = lambda _, logits: numpy._take(logits.copy())
        for _ in range(cuts):
            before = len(a)
            for _piece in a.generate(8, sampler, stop_at_end=False):
                break
            assert len(a) > before
            if other:
                b.step(5)
            if fails:
                ctx.native.fail_next = [1]
                with pytest.raises(NoKVSlot):
                    next(a.generate(5, sampler))
                assert list(a.generate(0, sampler)) == []
        list(a.generate(22 - len(a), sampler, stop_at_end=False))
        assert len(a) == 22
        return a.tokens

    expected = tokens(0)
    assert tokens(1) == tokens(4) == tokens(3, fails=True) == tokens(3, other=True) == expected


def test_a_changed_sequence_samples_again(tmp_path: Path) -> None:
    """A token that was sampled after another token than the last one is not used."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed(a.context.model.tokenize("Hi")), b.feed(b.context.model.tokenize("Hi"))])
    sampler = NumpySampler(SamplerParams(temperature=1.0, seed=3))
    for change in (
        lambda: a.step(7),
        lambda: a.trim(len(a) - 1),
        sampler.reset,
        lambda: sampler.take_ahead(b),
    ):
        generating = a.generate(5, sampler, stop_at_end=False)
        next(generating)
        generating.close()
        assert sampler._ahead is not None
        change()
        assert sampler.take_ahead(a) == (-1, -1)
    generating = a.generate(5, sampler, stop_at_end=False)
    next(generating)
    a.step(7)
    generating.close()
    assert sampler.take_ahead(a) == (-1, -1)
    sampler.keep_ahead(a, a.ledger.marks[-1], 120)
    list(a.generate(1, sampler))
    assert a.tokens[-1] == 120
