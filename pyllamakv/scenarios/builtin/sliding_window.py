"""Six clients of a sliding-window model talk in turn, long past their windows; half of them leave.

A model whose layers see a window has a second, small cache for them (from June 2025 on). Both get
scattered, and what no window shows any more has to make room there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES, MOVERS, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Decode wherever cells are free: as soon as holes came about, and until none is left."""
    # The small cache has the windows of all and one micro-batch, in most settings 256 cells.
    player = lab.player(512, n_batch=64, n_ubatch=64, n_seq_max=6)
    player.fill(dict.fromkeys(range(6), 80), interleave=True)
    player.check_windows(WINDOW)
    for seq in (1, 3, 5):
        player.remove(seq)
    lab.picture(player, "before")
    # More than any hole has, for a client that stays and a new one.
    with player.unchanged("a decode", window=WINDOW):
        player.decode({0: 32, 1: 32}, interleave=True)
    player.check_windows(WINDOW)
    lab.picture(player, "after")
    lab.verify(player)
    # All but the one cell that the proof needs.
    player.fill({3: player.n_cells - player.ledger.used - 1})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="sliding-window",
    kind="fix",
    claim="With a sliding window no decode fails while cells are free or out of every window.",
    issue="ollama/ollama#10127",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], MOVERS[0], MOVERS[1], SCATTERED),
)
