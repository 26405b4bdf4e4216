"""Decode prompts of any length, and let a model go on with a sequence, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import Cancelled, UsageError
from pyllamakv.runtime.batch import Feed
from pyllamakv.runtime.sampler import NumpySampler, Sampler, check_picker
from pyllamakv.runtime.sequence import checked
from pyllamakv.runtime.textstream import TextStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.runtime.batch import Wanted
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sampler import Picker
    from pyllamakv.runtime.sequence import Sequence


def prefill(context: Context, sequence: Sequence, tokens: Any, *, logits: bool) -> None:
    """Decode tokens in pieces of n_batch; `Context.prefill` describes it."""
    checked(sequence).check(context)
    logits = arguments.flag("logits", logits)
    rest = sequence.feed(tokens).tokens
    cancels, size = context.cancels, context.info.n_batch
    if not len(rest):
        msg = "there is nothing to decode: no tokens"
        raise UsageError(msg)
    for start in range(0, len(rest), size):
        if cancels != context.cancels:
            msg = f"cancelled with {len(rest) - start} tokens left; the others stay"
            raise Cancelled(msg, code=2)
        final = start + size >= len(rest)
        wanted: Wanted = "last" if logits and final else "none"
        context.decode(Feed(sequence, rest[start : start + size], wanted))


def generate(
    context: Context,
    sequence: Sequence,
    max_tokens: int | None,
    sampler: Picker | SamplerParams | None,
    stop_at_end: bool,
) -> Iterator[str]:
    """Yield text; `Context.generate` describes it."""
    checked(sequence).check(context)
    max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
    stop_at_end = arguments.flag("stop_at_end", stop_at_end)
    check_picker(sampler)
    if not len(sequence):
        msg = "the sequence has no tokens to go on from; decode a prompt first"
        raise UsageError(msg)
    return _run(context, sequence, max_tokens, sampler, stop_at_end)


def _run(
    context: Context,
    sequence: Sequence,
    max_tokens: int | None,
    sampler: Picker | SamplerParams | None,
    stop_at_end: bool,
) -> Iterator[str]:
    picker, mine = _picker(context, sampler)
    stream, cancels, model = TextStream(), context.cancels, context.model
    try:
        token = -1
        left = max_tokens
        while left is None or left > 0:
            if token < 0:
                _refresh(context, sequence)
                token = picker.pick(context, sequence.ledger.logits_at)
            if stop_at_end and model.is_end(token):
                break
            if cancels != context.cancels:
                msg = "the generation was cancelled; what was yielded is in the sequence"
                raise Cancelled(msg, code=2)
            context.step(sequence, token)
            text = stream.feed(model.piece(token))
            left = None if left is None else left - 1
            # The next token is chosen before the caller gets this one, and may decode others.
            token = picker.pick(context) if left is None or left else -1
            if text:
                yield text
        rest = stream.flush()
        if rest:
            yield rest
    finally:
        if mine is not None:
            mine.close()


def _picker(
    context: Context, sampler: Picker | SamplerParams | None
) -> tuple[Picker, Sampler | None]:
    if sampler is not None and not isinstance(sampler, SamplerParams):
        return sampler, None
    params = sampler or SamplerParams()
    if Capability.SAMPLER in context.native.about.capabilities:
        made = Sampler(context.model, params)
        return made, made
    return NumpySampler(params), None


def _refresh(context: Context, sequence: Sequence) -> None:
    """Decode the last token again when its logits are gone."""
    if sequence.ledger.logits_epoch == context.epoch:
        return
    last = sequence.ledger.tokens[-1]
    sequence.trim(len(sequence) - 1)
    context.step(sequence, last)
