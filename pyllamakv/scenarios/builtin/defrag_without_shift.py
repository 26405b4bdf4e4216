"""A requested defragmentation runs with and without a pending shift.

In June 2025, upstream skipped it for some days unless a shift was pending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Defragment without a shift, with a pending one, and after it was applied."""
    lab.needs(Capability.CELLS)
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 64, 1: 64, 2: 64}, interleave=True)
    player.remove(2)
    lab.picture(player, "before")
    with player.unchanged():
        _defrag(lab, player, "without a shift")
    player.remove(0, 4, 20)
    player.shift(0, 20, -1, -16)
    _defrag(lab, player, "with a pending shift")
    player.remove(1, 8, 24)
    with player.unchanged():
        _defrag(lab, player, "after the shift")
    lab.picture(player, "after")
    lab.verify(player)


def _defrag(lab: Lab, player: Player, when: str) -> None:
    player.defrag()
    player.check_cells()
    snapshot = player.snapshot()
    assert snapshot is not None
    stats = snapshot.stats
    lab.expect(
        stats.largest_hole == stats.free,
        f"defragmentation {when}: {stats.holes} holes are left, the largest has "
        f"{stats.largest_hole} of {stats.free} free cells",
    )


SCENARIO = Scenario(
    id="defrag-without-shift",
    kind="guard",
    claim="A requested defragmentation leaves one hole, with or without a pending shift.",
    issue="ggml-org/llama.cpp#14189",
    run=run,
    settings=(CACHES[0], CACHES[3], SCATTERED),
)
