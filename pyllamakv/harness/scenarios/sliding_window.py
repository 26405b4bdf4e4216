"""Six clients of a sliding-window model talk in turn, long past their windows; half of them leave.

A model whose layers see a window has a second, small cache for them (from June 2025 on). Both get
scattered, and what no window shows any more has to make room there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.harness import synthetic
from pyllamakv.harness.scenario import CACHES, MOVERS, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab

WINDOW = synthetic.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Decode wherever cells are free: after holes came about, in one long batch, and to the end."""
    player = lab.player(512, n_ubatch=32)
    player.fill(dict.fromkeys(range(6), 80), interleave=True)
    player.check_windows(WINDOW)
    for seq in (1, 3, 5):
        player.remove(seq)
    lab.picture(player, "before")
    # More than any hole has, for clients that stay and for a new one.
    with player.unchanged("a decode", window=WINDOW):
        player.decode({0: 40, 6: 40}, interleave=True)
    player.check_windows(WINDOW)
    # Longer than the windows of all: what its first tokens needed makes room for its last ones.
    with player.unchanged("a long decode", window=WINDOW):
        player.decode({2: 120})
    lab.picture(player, "after")
    player.check_windows(WINDOW)
    lab.verify(player)
    # All but the one cell that the proof needs.
    player.decode({7: player.n_cells - player.ledger.used - 1})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="sliding-window",
    kind="cure",
    claim="With a sliding window no decode fails while cells are free or out of every window.",
    issue="ollama/ollama#10127",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], MOVERS[0], MOVERS[1], SCATTERED),
)
