"""Continue several prompts side by side in one cache, a token of each at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import UsageError
from pyllamakv.harness.recording import record
from pyllamakv.runtime.sampler import NumpySampler, Sampler

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model


@dataclass(frozen=True)
class Told:
    """Hold one prompt with what the model made of it."""

    prompt: str
    text: str
    tokens: int
    ended: bool


def tell(
    model: Model,
    prompts: Sequence[str],
    *,
    max_tokens: int = 64,
    n_ctx: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    trace: Path | None = None,
    **options: Any,
) -> tuple[list[Told], dict[str, Any]]:
    """Return each prompt's continuation, and the statistics of the cache in the end.

    ``n_ctx`` 0 makes the cache as large as it may have to be; the run is recorded in ``trace``.
    ``options`` go to the context.
    """
    if not prompts:
        msg = "there is nothing to continue: pass at least one --prompt"
        raise UsageError(msg)
    tokens = [model.tokenize(prompt) for prompt in prompts]
    empty = next((n for n, each in enumerate(tokens) if not each), None)
    if empty is not None:
        msg = f"prompt {empty + 1} has no tokens"
        raise UsageError(msg)
    total = sum(map(len, tokens)) + len(prompts) * max_tokens
    size = n_ctx or -(-total // 256) * 256
    with model.context(n_ctx=size, n_batch=size, n_seq_max=len(prompts), **options) as context:
        params = SamplerParams(temperature=temperature, seed=seed)
        with nullcontext() if trace is None else record(context, trace):
            said, ended = _continue(model, context, params, tokens, max_tokens)
        stats = context.kv.stats.to_json()
    return [
        Told(prompt, model.detokenize(out), len(out), done)
        for prompt, out, done in zip(prompts, said, ended, strict=True)
    ], stats


def _continue(
    model: Model,
    context: Context,
    params: SamplerParams,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> tuple[list[list[int]], list[bool]]:
    sequences = [context.sequence() for _ in prompts]
    in_c = Capability.SAMPLER in model.native.about.capabilities
    samplers = [Sampler(model, params) if in_c else NumpySampler(params) for _ in prompts]
    said: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    feeds: dict[int, Sequence[int]] = dict(enumerate(prompts))
    while feeds:
        context.decode([sequences[n].feed(list(tokens)) for n, tokens in feeds.items()])
        following: dict[int, Sequence[int]] = {}
        for n in feeds:
            token = samplers[n].pick(context, sequences[n].ledger.logits_at)
            if model.is_end(token):
                ended[n] = True
                continue
            said[n].append(token)
            if len(said[n]) < max_tokens:
                following[n] = [token]
        feeds = following
    return said, ended
