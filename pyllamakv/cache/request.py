"""Check what is asked of a batcher, before anything is done for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.cache import groups as grouping
from pyllamakv.cache import stopping
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.sampler import NumpySampler, Sampler, check_picker, punishes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.cache.groups import Group
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import Picker


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Hold a prompt, and how it is to be continued; ``owned`` is a sampler made for it alone."""

    prompt: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_at_end: bool
    groups: tuple[Group, ...]
    sampler: Picker
    owned: Sampler | None


def checked(
    context: Context,
    greedy: Picker,
    n_batch: int,
    prompt: str | Iterable[int],
    *,
    max_tokens: int | None,
    stop: str | Iterable[str],
    sampler: Picker | SamplerParams | None,
    groups: Iterable[tuple[int, int]],
    stop_at_end: bool,
) -> Request:
    """Return a request, or raise UsageError or Unsupported for what cannot be right."""
    model = context.model
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    given: list[int] = as_int32(tokens, "tokens").tolist()
    if not given:
        msg = "the prompt is empty: there is nothing to continue"
        raise UsageError(msg)
    wrong = next((token for token in given if not 0 <= token < context.n_vocab), None)
    if wrong is not None:
        msg = f"token {wrong} is out of range: this model has tokens 0..{context.n_vocab - 1}"
        raise UsageError(msg)
    max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
    stop_at_end = arguments.flag("stop_at_end", stop_at_end)
    check_picker(sampler)
    strings = stopping.checked(stop)
    if strings and not model.info.has_vocab:
        msg = "this model has no vocabulary: there is no text to stop at"
        raise Unsupported(msg, "vocabulary")
    together = grouping.checked(groups, len(given), n_batch)
    picker, owned = _picker(model, greedy, sampler)
    return Request(given, max_tokens, strings, stop_at_end, together, picker, owned)


def make_sampler(model: Model, params: SamplerParams) -> Sampler | NumpySampler:
    """Return a sampler in C where the build has one, else in Python."""
    if Capability.SAMPLER in model.native.about.capabilities:
        return Sampler(model, params)
    return NumpySampler(params)


def _picker(model: Model, greedy: Picker, sampler: Any) -> tuple[Picker, Sampler | None]:
    if sampler is None:
        return greedy, None
    if not isinstance(sampler, SamplerParams):
        return sampler, None
    if sampler.temperature <= 0 and not punishes(sampler):
        return greedy, None
    made = make_sampler(model, sampler)
    return made, made if isinstance(made, Sampler) else None
