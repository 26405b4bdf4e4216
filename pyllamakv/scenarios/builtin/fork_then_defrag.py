"""Forks share cells. A defragmentation moves each cell once, for all its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fork a prompt twice, extend the forks, remove tokens, and defragment."""
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
    # The prompt's first sequence is removed; the cells that the forks share must stay.
    player.remove(0)
    player.fill({4: 40})
    lab.verify(player)


SCENARIO = Scenario(
    id="fork-then-defrag",
    kind="guard",
    claim="A cell that several sequences share keeps all of them when it moves.",
    issue="ggml-org/llama.cpp#14081",
    run=run,
)
