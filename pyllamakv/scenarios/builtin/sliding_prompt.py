"""Prompts longer than the window enter two fragmented caches, one batch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Decode prompts of several micro-batches. The last one reuses cells outside of the window."""
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    player.fill(dict.fromkeys(range(6), 48), interleave=True)
    for seq in (1, 3):
        player.remove(seq)
    with player.unchanged("a long decode", window=WINDOW):
        player.decode({0: 100})
    player.check_windows(WINDOW)
    with player.unchanged("two long decodes in a batch", window=WINDOW):
        player.decode({1: 60, 2: 40})
    player.check_windows(WINDOW)
    lab.picture(player, "after")
    lab.verify(player)
    player.remove(0)
    player.decode({6: player.n_cells - player.ledger.used - 1})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="sliding-prompt",
    kind="guard",
    claim=(
        "A prompt longer than the window finds its cells in both caches and is evaluated correctly."
    ),
    issue="ollama/ollama#10127",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], SCATTERED),
)
