"""A restore moves cells with a pending shift, or places tokens next to them.

The shift must move with its cells and affect no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Restore among shifted cells, and directly before them; decode."""
    _among(lab)
    _beside(lab)


def _among(lab: Lab) -> None:
    """Shift one of two interleaved sequences, restore a third into the holes."""
    player = lab.player(256)
    player.fill({2: 40})
    player.save(2, "kept")
    player.remove(2)
    player.fill({0: 104, 1: 104}, interleave=True)
    player.fill({3: 48})
    player.remove(1, 0, 64)
    player.remove(0, 4, 12)
    player.shift(0, 12, -1, -8)
    lab.picture(player, "before")
    player.restore(2, "kept")
    lab.picture(player, "after")
    player.check_cells()
    lab.verify(player)


def _beside(lab: Lab) -> None:
    """Shift a sequence, and restore another into the cells directly before it."""
    player = lab.player(256)
    player.fill({2: 64})
    player.save(2, "kept")
    player.fill({0: 8})
    player.remove(2)
    player.shift(0, 0, -1, 96)
    player.restore(2, "kept")
    player.check_cells()
    lab.verify(player)


SCENARIO = Scenario(
    id="restore-shifted",
    kind="guard",
    claim="A pending shift stays with its tokens when a restore moves their cells.",
    issue="ggml-org/llama.cpp#9201",
    run=run,
)
