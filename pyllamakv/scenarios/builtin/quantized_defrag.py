"""A defragmentation moves quantized rows: it must move these rows, and no bytes behind them.

To 0.3.8 the CPU's copy between two quantized rows of a type wrote 32 times too far, over the cells
behind the moved ones and over the end of the buffer: garbage until the server was started again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Let two clients talk in turn, take one's first half away, defragment, go on talking."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 80, 1: 80}, interleave=True)
    player.remove(1, 0, 40)
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    lab.picture(player, "after")
    player.decode({0: 4, 1: 4})
    lab.verify(player)


SCENARIO = Scenario(
    id="quantized-defrag",
    kind="fix",
    claim="A defragmentation moves quantized keys and values byte for byte.",
    issue="ggml-org/llama.cpp#12253",
    run=run,
    settings=(CACHES[1], CACHES[2], CACHES[4], CACHES[5], MOVERS[1]),
)
