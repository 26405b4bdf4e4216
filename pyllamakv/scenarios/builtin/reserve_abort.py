"""A requested defragmentation of a nearly full cache must not end the process.

Reserving a worst-case graph afterwards places a full micro-batch after the used cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Defragment with fewer free cells than a micro-batch has tokens."""
    player = lab.player(256, n_ubatch=64)
    player.fill({0: 128, 1: 128}, interleave=True)
    for pos in range(0, 84, 2):
        player.remove(1, pos, pos + 1)
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    lab.picture(player, "after")
    player.check_cells()
    player.decode({2: 41})
    lab.verify(player)


SCENARIO = Scenario(
    id="reserve-abort",
    kind="fix",
    claim="A defragmentation of a nearly full cache does not abort the process.",
    issue="ggml-org/llama.cpp#13359",
    run=run,
)
