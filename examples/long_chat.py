"""Continue a chat beyond the context: the oldest tokens after the head are discarded.

    python examples/long_chat.py [MODEL.gguf]

The cache has 256 cells. The chat keeps its head (the instructions). When the cache is full, the
remaining tokens are shifted, not decoded again.
"""

from __future__ import annotations

import sys

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

HEAD = "Once upon a time, there was a little girl named Lily. She loved to play outside."
LENGTH = 600


def main(path: str) -> None:
    """Generate more tokens than the cache has cells, and print each shift."""
    with (
        kv.open() as library,
        library.load_model(path) as model,
        model.context(n_ctx=256, n_batch=256) as context,
    ):
        head = model.tokenize(HEAD)
        with kv.SlotCache(context, keep=len(head)) as cache, kv.Batcher(cache) as batcher:
            chat = batcher.submit(head, max_tokens=LENGTH, stop_at_end=False)
            shifts, sequence = 0, None
            for _ in chat:
                sequence = chat.sequence
                if cache.stats().shifts > shifts:
                    shifts = cache.stats().shifts
                    print(f"{len(chat.tokens):4} tokens generated: shifted, {len(sequence)} remain")
            assert sequence is not None
            stats, kept = cache.stats(), sequence.tokens
            print(f"{len(head) + len(chat.tokens)} tokens went through {context.info.n_ctx} cells")
            print(f"{stats.shifts} shifts, {stats.reprocessed} tokens decoded again")
            print(f"the head is still there: {kept[: len(head)] == head}")
            print(f"...{chat.text[-60:]!r}")
            cache.check()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")))
