"""Generate text and chat in a sequence of a context.

`Sequence.generate` and `Context.chat` describe the calls. `cache.generation` is the generation of a
`Batcher`, which decodes several sequences at once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.errors import Cancelled, PartialRemovalRefused, UsageError
from pyllamakv.runtime import decode_failure
from pyllamakv.runtime.generated_text import GeneratedText, TextStream
from pyllamakv.runtime.sampler import (
    SampledAhead,
    Sampler,
    check_sampler,
    make_sampler,
    sample_token,
    sampler_option,
)
from pyllamakv.runtime.stop_strings import check_stop_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import TokenSampler
    from pyllamakv.runtime.sequence import Sequence


class PromptLease(Protocol):
    """A sequence for one prompt, with the tokens that were cached: `PrefixLease`."""

    sequence: Sequence
    cached: int

    def prefill(self) -> None:
        """Decode the rest of the prompt."""

    def make_room(self, n: int) -> None:
        """Free cells for ``n`` more tokens."""

    def release(self) -> None:
        """Release the sequence; its tokens stay cached."""


@runtime_checkable
class PromptCache(Protocol):
    """What a chat needs of a `PrefixCache`, which is in a package above this one."""

    def acquire(self, tokens: Iterable[int], *, salt: str | None = None) -> PromptLease:
        """Return a lease for a prompt, with its longest cached prefix."""

    def pin(self, name: str, tokens: Iterable[int]) -> None:
        """Protect a prefix from eviction: no other cache manager does."""


def check_cache(
    context: Context, sequence: Sequence | None, cache: PromptCache | None, salt: str | None
) -> None:
    """Raise UsageError for a wrong cache or salt of a chat, and for those that contradict."""
    if cache is None:
        if salt is not None:
            raise UsageError("salt= separates prefixes of a cache; pass cache= as well")
        return
    if not isinstance(cache, PromptCache):
        raise arguments.wrong_type("cache", cache, "a PrefixCache")
    if sequence is not None:
        raise UsageError("pass either sequence= or cache=: a cache selects the sequence")
    if getattr(cache, "context", None) is not context:
        raise UsageError("the cache is one of another context")
    if salt is not None:
        arguments.salt(salt)


def generate(
    sequence: Sequence,
    max_tokens: int | None,
    sampler: TokenSampler | SamplerParams | None,
    stop: str | Iterable[str],
    *,
    stop_at_end: bool,
) -> TextStream:
    """Generate from a sequence that has tokens; `Sequence.generate` describes it."""
    model, n_prompt = sequence.context.model, len(sequence)
    limits = _check_limits(max_tokens, sampler, stop, stop_at_end, has_vocab=model.info.has_vocab)
    if not n_prompt:
        msg = "the sequence has no tokens; decode a prompt first"
        raise UsageError(msg)
    output = GeneratedText(model, n_prompt, **limits, known={})
    output.reuse(n_prompt)
    return TextStream(output, lambda out: _generate(out, sequence, sampler))


def chat(
    context: Context,
    messages: Iterable[Mapping[str, Any]],
    max_tokens: int | None,
    sampler: TokenSampler | SamplerParams | None,
    *,
    tools: Iterable[Mapping[str, Any]] | None,
    stop: str | Iterable[str],
    stop_at_end: bool,
    sequence: Sequence | None,
    cache: PromptCache | None,
    salt: str | None,
    template: str | None,
    options: Mapping[str, Any],
) -> TextStream:
    """Generate the reply to the messages of a chat; `Context.chat` describes it."""
    model = context.model
    limits = _check_limits(max_tokens, sampler, stop, stop_at_end, has_vocab=model.info.has_vocab)
    for name in options:
        if option := sampler_option(name):
            msg = f"{name} is an option of samplers: pass sampler=model.sampler({option}=…)"
            raise UsageError(msg)
    tokens = model.tokenize_chat(messages, tools, template=template, **options)
    if not tokens:
        msg = "the chat template rendered no text"
        raise UsageError(msg)
    output = GeneratedText(model, len(tokens), **limits, known={})
    if cache is not None:
        return TextStream(output, lambda out: _chat_cached(out, tokens, sampler, cache, salt))
    return TextStream(output, lambda out: _chat(out, context, tokens, sampler, sequence))


class _Limits(TypedDict):
    """What ends a generation, as `GeneratedText` takes it."""

    max_tokens: int | None
    stop: tuple[str, ...]
    stop_at_end: bool


def _check_limits(
    max_tokens: Any, sampler: Any, stop: str | Iterable[str], stop_at_end: Any, *, has_vocab: bool
) -> _Limits:
    """Check the arguments that every generation has, and return what ends it."""
    max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
    stop_at_end = arguments.flag("stop_at_end", stop_at_end)
    check_sampler(sampler)
    strings = check_stop_strings(stop, has_vocab=has_vocab)
    return {"max_tokens": max_tokens, "stop": strings, "stop_at_end": stop_at_end}


def _chat(
    output: GeneratedText,
    context: Context,
    tokens: list[int],
    sampler: TokenSampler | SamplerParams | None,
    sequence: Sequence | None,
) -> Generator[str]:
    with ExitStack() as stack:
        used = stack.enter_context(context.sequence()) if sequence is None else sequence
        if isinstance(sampler, Sampler):
            sampler.begin(used, new=True)
        if context.guard:
            decode_failure.check_length(context, len(tokens))  # before anything is removed
        with context.lock:
            # The last token is always decoded, for its logits.
            pairs = zip(used.tokens, tokens[:-1], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens) - 1)
            same = min(same, len(used))
            # Shifted tokens have other positions than those of a prompt.
            if used.positions[:same] != list(range(same)):
                same = 0
            try:
                used.trim(same)
            except PartialRemovalRefused:
                used.remove()
            output.reuse(len(used))
            used.prefill(tokens[len(used) :])
        yield from _generate(output, used, sampler)


def _chat_cached(
    output: GeneratedText,
    tokens: list[int],
    sampler: TokenSampler | SamplerParams | None,
    cache: PromptCache,
    salt: str | None,
) -> Generator[str]:
    lease = cache.acquire(tokens, salt=salt)
    try:
        if isinstance(sampler, Sampler):
            sampler.begin(lease.sequence, new=True)
        output.reuse(lease.cached)
        lease.prefill()
        yield from _generate(output, lease.sequence, sampler, lease.make_room)
    finally:
        lease.release()


def _generate(
    output: GeneratedText,
    sequence: Sequence,
    sampler: TokenSampler | SamplerParams | None,
    make_room: Callable[[int], None] | None = None,
) -> Generator[str]:
    context = sequence.context
    picker, mine = _picker(context.model, sampler)
    cancels, yielded = context.cancels, 0
    token = mark = -1  # the sampled token, until it is decoded; the last one when it was
    try:
        if isinstance(picker, Sampler):
            picker.begin(sequence, new=False)
        if output.max_tokens == 0:
            output.end("length")
        elif isinstance(picker, SampledAhead):
            with context.lock:
                token, mark = picker.take_ahead(sequence)
        while not output.done:
            with context.lock:
                if token < 0:
                    _refresh(sequence)
                    token = sample_token(picker, context, sequence.ledger.logits_at)
                    mark = sequence.ledger.marks[-1]
                sequence.check_end([mark], f"token {token} was sampled after another one")
                if output.is_end(token):
                    token = -1
                    output.end("end")
                    break
                if cancels != context.cancels:
                    msg = "the generation was cancelled; yielded tokens are in the sequence"
                    raise Cancelled(msg, text=output.text)
                if make_room is not None:
                    make_room(1)
                sequence.step(token)
                decoded, token = token, -1
                if output.accept_token(decoded):
                    # Sample the next token before the caller gets this one and possibly decodes
                    # others.
                    token, mark = sample_token(picker, context), sequence.ledger.marks[-1]
            for part in output.parts(yielded):
                yielded += 1
                yield part
        yield from output.parts(yielded)
    finally:
        if mine is not None:
            mine.close()
        elif token >= 0 and isinstance(picker, SampledAhead):
            picker.keep_ahead(sequence, mark, token)


def _picker(
    model: Model, sampler: TokenSampler | SamplerParams | None
) -> tuple[TokenSampler, Sampler | None]:
    """Return the sampler to use, and the one to close afterwards if it was created here."""
    if sampler is not None and not isinstance(sampler, SamplerParams):
        return sampler, None
    made = make_sampler(model, sampler or SamplerParams())
    return made, made if isinstance(made, Sampler) else None


def _refresh(sequence: Sequence) -> None:
    """Decode the last token again when its logits were overwritten."""
    if sequence.ledger.logits_epoch == sequence.context.epoch:
        return
    if not len(sequence):
        msg = "the sequence was emptied before its generation; decode a prompt first"
        raise UsageError(msg)
    last = sequence.ledger.tokens[-1]
    sequence.trim(len(sequence) - 1)
    sequence.step(last)
