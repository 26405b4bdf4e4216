"""Prompts longer than the window enter two fragmented caches, one batch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
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
    _refused_then_cut(lab)


def _refused_then_cut(lab: Lab) -> None:
    """Refuse a batch, and remove tokens: the windows then contain cells that were outside.

    Two sequences share most cells, which therefore cannot be reused. Where the window has a cache
    of its own, the batch finds no cells there, even if all others outside of the windows are freed.
    """
    player = lab.player(512, n_ubatch=96, n_seq_max=4)
    player.fill({0: 150})
    player.copy(0, 1)
    player.fill({2: 60})
    refused = player.decode({3: 96}, expect=None) == DecodeStatus.NO_SLOT
    if refused:
        for seq in (0, 1, 2):
            player.remove(seq, player.ledger.next(seq) - 20)
    player.check_windows(WINDOW)
    lab.note(refused=refused)
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
