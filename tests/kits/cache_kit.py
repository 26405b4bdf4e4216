"""Help the tests of the cache managers: caches over simulated and real libraries, references."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import runtime_kit
from fakes.tiny_gguf import write_gguf

from pyllamakv.cache.context_cache import ContextCache
from qa.faults.steps.caching import StorePrefixes

if TYPE_CHECKING:
    import pyllamakv as kv


def simulated(folder: Path, native: dict[str, Any] | None = None, **options: Any) -> ContextCache:
    """Return a cache over a simulated context of 64 cells and 4 sequences."""
    return ContextCache(runtime_kit.context(folder, native, **options))


def forward(cache: Any, sequence: int, tokens: Any) -> None:
    """Decode more tokens of a sequence in batches of n_batch; return the logits of all of them."""
    given = list(tokens)
    while given:
        piece, given = given[: cache.max_batch], given[cache.max_batch :]
        start = cache.length(sequence)
        places = list(range(start, start + len(piece)))
        cache.start_forward(piece, places, [sequence] * len(piece), [True] * len(piece))


def picture(cache: ContextCache) -> list[Any]:
    """Return all that a refusal must not change: tokens, positions, cells, checkpoints."""
    ledgers = [(each.tokens.copy(), each.positions.copy()) for each in cache.context.ledgers]
    seen = cache.context.kv.try_snapshot()
    cells = [(each.pos.tolist(), each.seqs.tolist()) for each in seen.streams] if seen else []
    return [ledgers, cells, [ring.positions for ring in cache.rewinder.rings]]


def fresh(model: kv.Model, tokens: list[int], **options: Any) -> np.ndarray:
    """Decode tokens one after the other in a new context; return the logits of the last."""
    options = {"n_ctx": max(256, len(tokens)), "n_batch": 256, "n_ubatch": 64, **options}
    with model.context(**options) as ctx:
        ctx.sequence().prefill(tokens)
        return ctx.logits().copy()


def some(n: int, seed: int = 1) -> list[int]:
    """Return tokens of the smallest vocabulary, without a period."""
    return np.random.default_rng(seed).integers(1, 60, n).tolist()


class StoreSimulatedPrefixes(StorePrefixes):
    """Flush and reuse prefixes of simulated sequences."""

    def __init__(self) -> None:
        super().__init__(Path("simulated"), Path("model.gguf"))

    def prepare(self, folder: Path) -> None:
        """Write the model."""
        write_gguf(folder / self.model)

    def run(self, folder: Path) -> Any:
        """Run in the directory of the attempt."""
        self.model = folder / "model.gguf"
        return super().run(folder)

    def open(self) -> Any:
        """Open a simulated library."""
        return runtime_kit.library()
