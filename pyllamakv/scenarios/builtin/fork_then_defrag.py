"""Forks share cells; a defragmentation moves them once, for all their owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fork a prompt twice among other tokens, let the forks diverge, make holes, defragment."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 48, 3: 48}, interleave=True)
    player.copy(0, 1)
    player.copy(0, 2, 0, 24)
    player.fill({0: 16, 1: 16, 2: 16}, interleave=True)
    player.remove(3)
    player.remove(1, 56)
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    lab.picture(player, "after")
    lab.verify(player)
    # The prompt's first owner leaves: what the forks share must stay.
    player.remove(0)
    player.fill({4: 40})
    lab.verify(player)


SCENARIO = Scenario(
    id="fork-then-defrag",
    kind="guard",
    claim="Cells that sequences share keep all their owners when they move.",
    issue="ggml-org/llama.cpp#14081",
    run=run,
)
