"""Six clients of a sliding-window model decode far beyond their windows, and half of them leave.

Since June 2025, the layers with a window have a second, small cache. Both caches become fragmented,
and cells outside of every window must be reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES, MOVERS, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Decode wherever cells are free: as soon as holes exist, and until none is left."""
    # The window cache holds all windows and one micro-batch: 256 cells in most settings.
    player = lab.player(512, n_batch=64, n_ubatch=64, n_seq_max=6)
    player.fill(dict.fromkeys(range(6), 80), interleave=True)
    player.check_windows(WINDOW)
    for seq in (1, 3, 5):
        player.remove(seq)
    lab.picture(player, "before")
    # More tokens than any hole has cells, for an existing client and a new one.
    with player.unchanged("a decode", window=WINDOW):
        player.decode({0: 32, 1: 32}, interleave=True)
    player.check_windows(WINDOW)
    lab.picture(player, "after")
    lab.verify(player)
    # Use all free cells but one, which `verify` needs.
    player.fill({3: player.free - 1})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="sliding-window",
    kind="fix",
    claim=(
        "In a sliding-window model, no decode fails while cells are free or outside of "
        "every window."
    ),
    issue="ollama/ollama#10127",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], MOVERS[0], MOVERS[1], SCATTERED),
)
