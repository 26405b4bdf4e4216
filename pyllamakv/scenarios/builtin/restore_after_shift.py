"""A sequence with a pending shift is removed, and another one is restored into its cells.

The shift belongs to the removed tokens and must not rotate the restored keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Shift, remove the shifted sequence or all sequences, restore, and decode."""
    for everything in (False, True):
        player = lab.player(256)
        player.fill({2: 64})
        player.save(2, "kept")
        player.remove(2)
        player.fill({0: 96})
        player.fill({1: 32})
        player.remove(0, 4, 12)
        player.shift(0, 12, -1, -8)
        if everything:
            player.clear()
        else:
            player.remove(0)
        player.restore(2, "kept")
        player.check_cells()
        player.decode({2: 8})
        lab.verify(player)


SCENARIO = Scenario(
    id="restore-after-shift",
    kind="fix",
    claim="A pending shift of removed tokens does not affect tokens restored into their cells.",
    issue="ggml-org/llama.cpp#9201",
    run=run,
)
