"""A deep model needs more moves than one graph holds.

The moves that fit into one pass fall with the number of layers (170 at 64 layers), so one pass
leaves a cache of 512 single holes fragmented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.harness.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab


def run(lab: Lab) -> None:
    """Ask for all free cells at once after every second cell was freed."""
    player = lab.player(1024, n_ubatch=512)
    player.fill({0: 512, 1: 512}, interleave=True)
    player.remove(1)
    lab.picture(player, "before")
    with player.unchanged("the decode"):
        player.decode({2: 512})
    lab.picture(player, "after")
    player.remove(2, 500)
    lab.verify(player)
    counters = player.counters()
    if counters is not None:
        lab.note(moves=counters.moves, graphs=counters.graphs)


SCENARIO = Scenario(
    id="many-moves",
    kind="cure",
    claim="A defragmentation is complete, however many moves it takes.",
    issue="ggml-org/llama.cpp#6685",
    run=run,
    model="deep",
    settings=(CACHES[0], CACHES[3], CACHES[4]),
)
