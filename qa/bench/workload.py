"""Define the workloads of the decode loops, and the result of a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pyllamakv.errors import HarnessError

Kind = Literal["greedy", "logits", "prompt"]

#: Sizes of the batches that a prompt is decoded in.
PIECE = 128


@dataclass(frozen=True)
class Workload:
    """A loop: ``steps`` tokens in each of ``sequences``, or a prompt of ``steps`` tokens.

    ``greedy`` continues with the most likely token, ``logits`` reads the first logit of each
    output. ``peers`` are the compared interfaces of llama-cpp-python.
    """

    name: str
    kind: Kind
    sequences: int
    steps: int
    peers: tuple[str, ...]
    #: Steps of our side in a call (`Context.advance`); 0: one step per call.
    burst: int = 0

    @property
    def samples(self) -> bool:
        """Return whether the result is the last tokens."""
        return self.kind == "greedy"

    @property
    def n_batch(self) -> int:
        """Return the tokens of one batch."""
        return PIECE if self.kind == "prompt" else self.sequences

    @property
    def n_ctx(self) -> int:
        """Return the number of cells that the workload needs."""
        return self.sequences * self.steps

    @property
    def tokens(self) -> list[int]:
        """Return the first token of each sequence, or the prompt."""
        n = self.steps if self.kind == "prompt" else self.sequences
        return [3 + 7 * i % 250 for i in range(n)]

    def to_json(self) -> dict[str, Any]:
        """Return what the loop of a child process needs."""
        sizes = {"n_ctx": self.n_ctx, "n_batch": self.n_batch}
        return {**asdict(self), **sizes, "tokens": self.tokens}


@dataclass(frozen=True)
class Round:
    """The CPU seconds of one round, and its result: tokens, or the last logit read.

    ``wall`` are the seconds of the wall clock, 0 if they are not measured.
    """

    seconds: float
    result: list[float]
    wall: float = 0


Runner = Callable[[], Round]


def require_same_result(name: str, mine: Round, other: Round) -> None:
    """Raise an error if two loops computed different results."""
    pairs = zip(mine.result, other.result, strict=False)
    same = len(mine.result) == len(other.result) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in pairs
    )
    if not same:
        msg = f"{name}: the loops did different work: {mine.result} and {other.result}"
        raise HarnessError(msg)
