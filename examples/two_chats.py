"""Let two chats share a system prompt, which is decoded once and stored once.

    python examples/two_chats.py [MODEL.gguf]

Both chats are continued in the same batches. The second round of each chat reuses its first round
from the cache and decodes only new tokens. The text of a generated model is meaningless.
"""

from __future__ import annotations

import sys

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

SYSTEM = (
    "Once upon a time, there was a little girl named Lily. She had a big red ball, a small blue "
    "boat and a dog named Max. Every day they went to the park, and there they met a friend."
)
CHATS = {"boat": " One day Lily took the boat and", "dog": " One day Max saw a cat and"}


def main(path: str) -> None:
    """Print the cached tokens of each round, and the number of cells of both chats."""
    with (
        kv.open() as library,
        library.load_model(path) as model,
        model.context(n_ctx=2048, n_batch=512, n_seq_max=4) as context,
        kv.PrefixCache(context) as cache,
        kv.Batcher(cache) as batcher,
    ):
        batcher.submit(SYSTEM, max_tokens=0).result()
        head = context.kv.stats.used
        cache.pin("system", model.tokenize(SYSTEM))
        print(f"system prompt: {head} cells")

        said = {name: model.tokenize(SYSTEM + first) for name, first in CHATS.items()}
        for number in (1, 2):
            rounds = {name: batcher.submit(said[name], max_tokens=24) for name in CHATS}
            batcher.run()
            for name, each in rounds.items():
                print(f"round {number}, {name}: {each.cached} of {len(each.prompt)} tokens cached")
                following = model.tokenize("\nThen they", add_special=False)
                said[name] = [*each.prompt, *each.tokens, *following]

        for name in CHATS:
            text = model.detokenize(said[name][head : -len(following)])
            print(f"{name}: {text!r}")
        stats = context.kv.stats
        apart = sum(each.cells for each in stats.per_sequence.values())
        print(f"{stats.used} cells in use; without sharing {apart}")
        cache.check()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")))
