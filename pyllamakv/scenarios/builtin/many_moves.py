"""A deep model needs more moves than one graph can hold.

The number of moves per pass falls with the number of layers (170 at 64 layers, 11 in later
releases). One pass leaves a cache with 192 holes below its last used cell fragmented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Request all free cells at once after every second cell was freed."""
    player = lab.player(768, n_ubatch=384)
    player.fill({0: 384, 1: 384}, interleave=True)
    player.remove(1)
    lab.picture(player, "before")
    with player.unchanged("the decode"):
        player.decode({2: 384})
    lab.picture(player, "after")
    player.remove(2, 380)
    lab.verify(player)
    counters = player.counters()
    if counters is not None:
        lab.note(moves=counters.moves, graphs=counters.graphs)


SCENARIO = Scenario(
    id="many-moves",
    kind="fix",
    claim="A defragmentation is complete, however many moves it needs.",
    issue="ggml-org/llama.cpp#6685",
    run=run,
    model="deep",
    settings=(CACHES[0], CACHES[3], CACHES[4], *MOVERS[:2]),
)
