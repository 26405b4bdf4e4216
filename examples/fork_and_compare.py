"""Fork a prompt and compare several endings: the prompt is decoded once and stored once.

    python examples/fork_and_compare.py [MODEL.gguf]

Score endings by their likelihood, as multiple-choice tests do. Each ending is a fork that shares
the cells of the prompt. All endings are decoded in one batch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMPT = "One day, a little girl named Lily found a needle in her room. She knew it was"
ENDINGS = (
    " difficult to play with it because it was sharp.",
    " a very big dog.",
    " blue and because.",
)


def log_probabilities(logits: Any) -> NDArray[np.float32]:
    """Return the log-probability of each token, row by row."""
    rows = np.atleast_2d(np.array(logits))
    rows -= rows.max(axis=1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def main(path: str) -> None:
    """Score the endings, and print the number of cells in use."""
    with (
        kv.open() as library,
        library.load_model(path) as model,
        model.context(n_ctx=1024, n_batch=512, n_seq_max=1 + len(ENDINGS)) as context,
    ):
        trunk = context.sequence()
        trunk.prefill(model.tokenize(PROMPT))
        (after_prompt,) = log_probabilities(context.logits())

        endings = [model.tokenize(ending, add_special=False) for ending in ENDINGS]
        forks = [trunk.fork() for _ in endings]
        context.decode(
            [fork.feed(ending, logits="all") for fork, ending in zip(forks, endings, strict=True)]
        )
        rows = iter(log_probabilities(context.logits_all()))

        scores = []
        for tokens in endings:
            # Row i predicts token i + 1; the last row of the prompt predicts the first token.
            predictions = [after_prompt, *(next(rows) for _ in tokens)][:-1]
            found = [row[token] for row, token in zip(predictions, tokens, strict=True)]
            scores.append(float(np.mean(found)))
        for score, ending in sorted(zip(scores, ENDINGS, strict=True), reverse=True):
            print(f"{score:8.3f} {ending!r}")

        stats = context.kv.stats
        apart = len(trunk) + sum(len(fork) for fork in forks)
        print(f"{stats.used} cells, {stats.shared} of them shared; without forks {apart}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")))
