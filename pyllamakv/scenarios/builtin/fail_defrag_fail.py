"""A decode fails, the caller defragments and retries, and the retry fails too.

The first failure recorded cells by index. After the defragmentation, other sequences own these
cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Request more cells than are free, twice, with a defragmentation in between."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 60})
    player.fill({1: 166})
    player.remove(0)
    # 90 cells are free: 60 at the start, 30 at the end. The first micro-batch fits.
    player.decode({2: 96}, expect=DecodeStatus.NO_SLOT)
    player.check_cells()
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    player.decode({2: 96}, expect=DecodeStatus.NO_SLOT)
    lab.picture(player, "after")
    player.check_cells()
    player.decode({2: 64})
    lab.verify(player)


SCENARIO = Scenario(
    id="fail-defrag-fail",
    kind="fix",
    claim="A decode that fails after a defragmentation removes no tokens of other sequences.",
    issue="ggml-org/llama.cpp#12695",
    run=run,
)
