"""Test chats: the prompt is made of messages, and only its new part is evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit
from batching_kit import Fixed
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, MemoryType
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import PromptTooLong, Unsupported, UsageError
from pyllamakv.runtime.generated_text import Usage

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def chat_context(folder: Path, **native: object) -> Context:
    """Return a context whose model has a chat template."""
    return kit.context(folder, {"meta": {"tokenizer.chat_template": TEMPLATE}, **native})


def test_chat_without_a_sequence_frees_its_cells(tmp_path: Path) -> None:
    """The reply is that to the rendered text; the sequence is opened late, and closed."""
    ctx = chat_context(tmp_path)
    a = ctx.sequence()
    a.prefill(ctx.model.tokenize("<u>Hi<a>", add_special=False))
    expected = "".join(a.generate(8))
    reply = ctx.chat([{"role": "user", "content": "Hi"}], 8)
    assert len(ctx.vacant) == 3
    assert "".join(reply) == expected
    assert len(ctx.vacant) == 3
    assert ctx.kv.stats.used == len(a)


def test_a_sequence_keeps_the_chat(tmp_path: Path) -> None:
    """The second call evaluates only new tokens, and generates what a new sequence would."""
    ctx = chat_context(tmp_path)
    a = ctx.sequence()
    messages = [{"role": "user", "content": "Hi"}]
    messages.append({"role": "assistant", "content": "".join(ctx.chat(messages, 5, sequence=a))})
    kept = a.tokens
    messages.append({"role": "user", "content": "Go on"})
    expected = "".join(ctx.chat(messages, 5))
    epoch = ctx.epoch
    assert "".join(ctx.chat(messages, 5, sequence=a)) == expected
    assert a.tokens[: len(kept)] == kept
    assert ctx.epoch - epoch == 1 + 5  # one batch of the new tokens, then each generated one


def test_changed_chat_keeps_the_common_prefix(tmp_path: Path) -> None:
    """Only the common start remains; shifted tokens and partial states are evaluated again."""
    for native, shift in (({}, False), ({"partial": False}, False), ({}, True)):
        ctx = chat_context(tmp_path, **native)
        a = ctx.sequence()
        for _ in ctx.chat([{"role": "user", "content": "one two"}], 4, sequence=a):
            pass
        if shift:
            a.shift(None, None, 3)
        messages = [{"role": "user", "content": "one three"}]
        expected = "".join(ctx.chat(messages, 4))
        assert "".join(ctx.chat(messages, 4, sequence=a)) == expected
        assert a.positions == list(range(len(a)))


def test_repeated_chat_has_the_same_reply(tmp_path: Path) -> None:
    """The last token is evaluated again, for its logits."""
    ctx = chat_context(tmp_path)
    a = ctx.sequence()
    replies = {"".join(ctx.chat([{"role": "user", "content": "Hi"}], 4, sequence=a)) for _ in "ab"}
    assert len(replies) == 1


def test_usage_counts_what_the_sequence_had(tmp_path: Path) -> None:
    """The first chat evaluates all of its prompt, the second only the difference."""
    ctx = chat_context(tmp_path)
    a = ctx.sequence()
    messages = [{"role": "user", "content": "one two"}]
    first = ctx.chat(messages, 4, sequence=a)
    reply = "".join(first)
    n = len(a) - 4
    assert (first.finish_reason, first.text, first.usage) == ("length", reply, Usage(n, 0, 4))
    again = ctx.chat(messages, 2, sequence=a)
    list(again)
    assert again.usage == Usage(n, n - 1, 2)
    failed = ctx.chat([{"role": "user", "content": "x" * 100}])
    with pytest.raises(PromptTooLong):
        next(failed)
    assert (failed.finish_reason, failed.usage.reused, failed.tokens) == ("failed", 0, [])


@pytest.mark.parametrize("partial", [True, False])
def test_a_cache_reuses_prefixes_of_other_chats(tmp_path: Path, partial: bool) -> None:
    """They do with the same salt. Replies are those without a cache, also after evictions."""
    plain = chat_context(tmp_path)
    native = {"meta": {"tokenizer.chat_template": TEMPLATE}, "partial": partial}
    ctx = kit.context(tmp_path, native, n_ctx=128)
    if not partial:
        object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    often = CheckpointSchedule(size=100, interval=4, first=1)
    cache = PrefixCache(ctx, checkpoints=often)
    system = {"role": "system", "content": "Be brief and kind."}
    reused = {}
    for salt, question in ((None, "one"), (None, "two"), ("a", "one"), ("a", "two"), (None, "one")):
        messages = [system, {"role": "user", "content": question}]
        expected = "".join(plain.chat(messages, 20))
        reply = ctx.chat(messages, 20, cache=cache, salt=salt)
        assert "".join(reply) == expected
        assert (reply.finish_reason, reply.usage.generated) == ("length", 20)
        reused.setdefault(salt, []).append(reply.usage.reused)
        assert cache.stats().leased == 0
        cache.check()
    assert [each[0] for each in reused.values()] == [0, 0]
    assert all(n >= 16 for each in reused.values() for n in each[1:])
    assert cache.stats().evictions + cache.stats().paged_out > 0


def test_a_chat_releases_its_lease(tmp_path: Path) -> None:
    """The lease ends if iteration stops early or the prompt is refused; it starts with it."""
    ctx = chat_context(tmp_path)
    cache = PrefixCache(ctx)
    messages = [{"role": "user", "content": "Hi"}]
    reply = ctx.chat(messages, cache=cache)
    assert cache.stats().leased == 0
    next(reply)
    assert cache.stats().leased == 1
    reply.close()
    assert cache.stats().leased == 0
    other = kit.context(tmp_path)
    for wrong, match in (
        ({"cache": 1}, "cache"),
        ({"cache": SlotCache(kit.context(tmp_path))}, "PrefixCache"),
        ({"cache": PrefixCache(other)}, "another context"),
        ({"cache": cache, "sequence": ctx.sequence()}, "either"),
        ({"salt": "a"}, "cache="),
        ({"cache": cache, "salt": ""}, "salt"),
        ({"cache": cache, "salt": 5}, "salt"),
    ):
        with pytest.raises(UsageError, match=match):
            ctx.chat(messages, **wrong)
    with pytest.raises(PromptTooLong, match="at most"):
        next(ctx.chat([{"role": "user", "content": "x" * 100}], cache=cache))
    cache.check()


def test_bad_chats_are_refused_at_once(tmp_path: Path) -> None:
    """They are before the iterator requests a token, unless the cache is too small."""
    ctx = chat_context(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    for wrong in (
        {"max_tokens": -1}, {"sampler": 1}, {"stop": ""}, {"stop_at_end": 1}, {"sequence": 1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            ctx.chat(messages, **wrong)
    with pytest.raises(UsageError, match="messages is empty"):
        ctx.chat([])
    with pytest.raises(UsageError, match="rendered no text"):
        ctx.chat(messages, template="")
    with pytest.raises(PromptTooLong):
        next(ctx.chat([{"role": "user", "content": "x" * 100}]))
    assert len(ctx.vacant) == 4
    a = ctx.sequence()
    list(ctx.chat(messages, 4, sequence=a))
    before = a.tokens
    with pytest.raises(PromptTooLong):
        next(ctx.chat([{"role": "user", "content": "x" * 100}], sequence=a))
    assert a.tokens == before
    with pytest.raises(Unsupported, match="no chat template"):
        kit.context(tmp_path).chat(messages)


def test_a_stop_string_and_options(tmp_path: Path) -> None:
    """Options of the template and of the generation reach both."""
    ctx = chat_context(tmp_path)
    whole = "".join(ctx.chat([{"role": "user", "content": "Hi"}], 8))
    cut = "".join(ctx.chat([{"role": "user", "content": "Hi"}], 8, stop=whole[3:5]))
    assert cut == whole[:3]
    other = "".join(
        ctx.chat([{"role": "user", "content": "Hi"}], 8, template="{{ x }}", x="<u>Hi<a>")
    )
    assert other == whole


def test_a_reply_may_continue_after_an_end_token(tmp_path: Path) -> None:
    """The option is the same in all calls that generate."""
    ctx, messages = chat_context(tmp_path), [{"role": "user", "content": "Hi"}]
    assert "".join(ctx.chat(messages, 3, Fixed([100, 2, 101]))) == "a"
    assert "".join(ctx.chat(messages, 3, Fixed([100, 2, 101]), stop_at_end=False)) == "ab"


def test_options_of_samplers_are_no_variables(tmp_path: Path) -> None:
    """They would have no effect: the error names the argument for them."""
    ctx, messages = chat_context(tmp_path), [{"role": "user", "content": "Hi"}]
    for name, option in (
        ("temperature", "temperature"),
        ("json_schema", "json_schema"),
        ("repeat_penalty", "penalty_repeat"),
        ("logprobs", "top_logprobs"),
    ):
        with pytest.raises(UsageError, match=rf"sampler=model\.sampler\({option}=…\)"):
            ctx.chat(messages, 4, **{name: 1})
    assert "".join(ctx.chat(messages, 4, enable_thinking=False))


def test_a_grammar_restricts_one_text(tmp_path: Path) -> None:
    """Another reply needs a reset, also in the same sequence; an unused sampler is not begun."""
    ctx = chat_context(tmp_path, capabilities=ALL | Capability.GRAMMAR)
    messages = [{"role": "user", "content": "Hi"}]
    a, b = ctx.sequence(), ctx.sequence()
    with ctx.model.sampler(grammar='root ::= "x"*') as sampler:
        with pytest.raises(PromptTooLong):
            next(ctx.chat([{"role": "user", "content": "x" * 100}], 4, sampler))
        first = "".join(ctx.chat(messages, 4, sampler, sequence=a))
        for again in (None, a):
            with pytest.raises(
                UsageError, match=r"the tokens of another text: call sampler\.reset"
            ):
                next(ctx.chat(messages, 4, sampler, sequence=again))
        tokens = a.tokens
        b.prefill(tokens)
        with pytest.raises(UsageError, match="another text"):
            next(b.generate(4, sampler))
        assert "".join(a.generate(4, sampler))
        sampler.reset()
        assert "".join(ctx.chat(messages, 4, sampler, sequence=b)) == first
    with ctx.model.sampler(grammar='root ::= "x"*') as sampler:
        a.step(sampler.sample(ctx))
        assert "".join(a.generate(2, sampler)), "the loop of the caller began this text"
    with ctx.model.sampler(temperature=1.0, penalty_last_n=4, penalty_repeat=1.1) as sampler:
        assert all("".join(ctx.chat(messages, 4, sampler)) for _ in "ab")
