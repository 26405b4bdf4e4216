"""In a batch of several micro-batches, a later one finds no contiguous cells.

The defragmentation moves the cells of the first micro-batch too. If the free cells are contiguous,
and only the search for cells starts among them, nothing has to move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import CACHES, MOVERS, ORDERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Fill a cache whose free cells are one hole of 40 and 80 single cells."""
    player = _scattered(lab)
    lab.picture(player, "before")
    with player.unchanged("the decode"):
        player.decode({3: 119})
    lab.picture(player, "after")
    lab.verify(player)
    # The first micro-batch ends a sequence, so that logits exist before the retry.
    player = _scattered(lab)
    player.decode({3: 20, 4: 99})
    lab.verify(player)
    # The batch fills the cache. The search starts at the cells freed last: 8 free cells are before
    # them, and 24 after the second micro-batch.
    player = lab.player(256, n_ubatch=32)
    for seq, n_tokens in ((0, 160), (1, 8), (2, 19)):
        player.fill({seq: n_tokens})
    player.remove(1)
    player.decode({2: 11})
    player.remove(2)
    player.decode({3: 96})
    player.remove(3, 88)
    lab.verify(player)


def _scattered(lab: Lab) -> Player:
    player = lab.player(256, n_ubatch=32)
    player.fill({1: 108, 2: 108}, interleave=True)
    player.fill({0: 40})
    player.remove(0)
    player.remove(1, 0, 80)
    return player


SCENARIO = Scenario(
    id="retry-between-ubatches",
    kind="fix",
    claim="A decode defragments between its micro-batches if a later one finds no slot.",
    issue="ggml-org/llama.cpp#10873",
    run=run,
    settings=CACHES + MOVERS + ORDERED,
)
