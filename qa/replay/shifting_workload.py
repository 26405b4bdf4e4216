"""Generate prompts over documents whose popularity shifts: what was in demand is not any more.

A prompt is a document and a question. In each phase, documents are chosen by Zipf's law in another
order, so that a policy which keeps what was frequent before keeps the wrong documents.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Final

from qa.replay.replayed_request import ReplayedRequest

#: Tokens of a cell.
CELL: Final = 64


@dataclass(frozen=True)
class ShiftingTraffic:
    """A workload of ``requests`` in ``phases``; the document of rank r has the weight 1 / r**skew.

    Lengths are in cells.
    """

    requests: int = 1500
    phases: int = 6
    documents: int = 300
    skew: float = 1.0
    document: tuple[int, int] = (4, 24)
    question: tuple[int, int] = (1, 3)
    seed: int = 1


def generate(traffic: ShiftingTraffic) -> list[ReplayedRequest]:
    """Return the requests in the order of their arrival."""
    draw = random.Random(traffic.seed)
    numbers = count(1)

    def some(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(draw.randint(*bounds)))

    documents = [some(traffic.document) for _ in range(traffic.documents)]
    weights = list(accumulate(1 / rank**traffic.skew for rank in range(1, len(documents) + 1)))
    found = []
    for number in range(traffic.requests):
        if number * traffic.phases % traffic.requests < traffic.phases:
            draw.shuffle(documents)
        (document,) = draw.choices(documents, cum_weights=weights)
        found.append(ReplayedRequest(document + some(traffic.question)))
    return found
