"""A batch that is larger than the free cells fails, and leaves and loses nothing.

Once with the free cells side by side, and twice scattered, so that a build which defragments
inside a decode does it after the first micro-batch has its place, in front where nothing moves or
at the end where everything does, and before the last one fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fail, check that all is as it was, and decode what fits."""
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
        # 90 cells are free and 96 are asked for: the third micro-batch fails.
        lab.picture(player, f"{where}, before")
        with player.unchanged("the failed decode"):
            player.decode({3: 96}, expect=DecodeStatus.NO_SLOT)
        lab.picture(player, f"{where}, after")
        lab.verify(player)
        player.decode({3: 30})
        lab.verify(player)


SCENARIO = Scenario(
    id="fail-between-ubatches",
    kind="guard",
    claim="A decode that fails between its micro-batches leaves every sequence as it was.",
    issue="ggml-org/llama.cpp#12695",
    run=run,
)
