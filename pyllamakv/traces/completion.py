"""Continue several prompts in one cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import UsageError
from pyllamakv.traces.recording import record

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.model import Model

#: Maximum number of prompts that are continued at once; the others wait.
MAX_SEQUENCES = 32


@dataclass(frozen=True)
class Completion:
    """One prompt with its generated text."""

    prompt: str
    text: str
    tokens: int
    ended: bool


def complete_prompts(
    model: Model,
    prompts: Sequence[str],
    *,
    max_tokens: int = 64,
    n_ctx: int = 0,
    temperature: float = 0.0,
    seed: int | None = None,
    trace: Path | None = None,
    **options: Any,
) -> tuple[list[Completion], dict[str, Any]]:
    """Return each prompt's continuation, and the statistics of the cache at the end.

    With ``n_ctx`` 0, the cache has the size that the prompts can need at most. The run is recorded
    in ``trace``. ``options`` are parameters of the context.
    """
    if not prompts:
        msg = "pass at least one --prompt"
        raise UsageError(msg)
    tokens = [model.tokenize(prompt) for prompt in prompts]
    empty = next((n for n, each in enumerate(tokens) if not each), None)
    if empty is not None:
        msg = f"prompt {empty + 1} has no tokens"
        raise UsageError(msg)
    total = sum(map(len, tokens)) + len(prompts) * max_tokens
    size = n_ctx or -(-total // 256) * 256
    n_seqs = min(len(prompts), MAX_SEQUENCES)
    params = SamplerParams(temperature=temperature, seed=seed)
    with (
        model.context(n_ctx=size, n_batch=size, n_seq_max=n_seqs, **options) as context,
        nullcontext() if trace is None else record(context, trace),
        SlotCache(context, size=context.info.n_ctx // context.partitions) as cache,
        Batcher(cache) as batcher,
    ):
        going = [batcher.submit(each, max_tokens, sampler=params) for each in tokens]
        batcher.run()
        stats = context.kv.stats.to_json()
        return [
            Completion(prompt, each.result(), len(each.tokens), each.finish_reason == "end")
            for prompt, each in zip(prompts, going, strict=True)
        ], stats
