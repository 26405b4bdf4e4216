"""A batch with more tokens than free cells fails and changes nothing.

The free cells are contiguous once and scattered twice. A build that defragments inside a decode
then does so after the first micro-batch was placed, either below the moved cells or above them, and
before the last one fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fail, check that nothing changed, and decode a batch that fits."""
    for where in ("together", "hole in front", "hole at the end"):
        player = lab.player(256, n_ubatch=32)
        if where == "together":
            player.fill({1: 83, 2: 83}, interleave=True)
        else:
            if where == "hole in front":
                player.fill({0: 40})
            player.fill({1: 108, 2: 108}, interleave=True)
            if where == "hole at the end":
                player.fill({0: 40})
            player.remove(0)
            player.remove(1, 0, 50)
        # 90 cells are free and 96 are requested: the third micro-batch fails.
        lab.picture(player, f"{where}, before")
        with player.unchanged("the failed decode"):
            player.decode({3: 96}, expect=DecodeStatus.NO_SLOT)
        lab.picture(player, f"{where}, after")
        lab.verify(player)
        player.decode({3: 30})
        lab.verify(player)
    for first in (True, False):
        _several_before(lab, hole_first=first)


def _several_before(lab: Lab, *, hole_first: bool) -> None:
    """Place two micro-batches, defragment for the third, and fail in the fifth.

    The defragmentation moves both micro-batches if they are above the other cells.
    """
    player = lab.player(256, n_ubatch=32)
    if hole_first:
        player.fill({0: 70})
    player.fill({1: 93, 2: 93}, interleave=True)
    if not hole_first:
        player.fill({0: 70})
    player.remove(0)
    player.remove(1, 0, 80)
    with player.unchanged("the failed decode of five micro-batches"):
        player.decode({3: 160}, expect=DecodeStatus.NO_SLOT)
    lab.verify(player)
    player.decode({3: 30})
    lab.verify(player)


SCENARIO = Scenario(
    id="fail-between-ubatches",
    kind="guard",
    claim="A decode that fails between its micro-batches leaves every sequence unchanged.",
    issue="ggml-org/llama.cpp#12695",
    run=run,
)
