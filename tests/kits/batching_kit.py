"""Helpers for tests of the batcher: samplers with given tokens, and references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import runtime_kit as kit

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


class Fixed:
    """Sample tokens from a list."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def sample(self, context: Context, index: int = -1) -> int:
        """Return the next token of the list; requires readable logits."""
        context.logits(index)
        return self.tokens.pop(0)


def scripted(data: bytes) -> Fixed:
    """Return a sampler that generates these bytes, then an end token."""
    return Fixed([*(byte + 3 for byte in data), 2])


def alone(folder: Path, prompt: str | list[int], n: int, **native: Any) -> str:
    """Return the text that the runtime generates for a prompt in a separate context."""
    ctx = kit.context(folder, native, n_ctx=256)
    sequence = ctx.sequence()
    sequence.prefill(ctx.model.tokenize(prompt) if isinstance(prompt, str) else prompt)
    return "".join(sequence.generate(n))


PROMPTS = ["Hi", "Once upon a time there was", "Hello", "x" * 50, "Once upon a hill", "y" * 40]
