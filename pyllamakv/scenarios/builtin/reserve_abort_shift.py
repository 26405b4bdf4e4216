"""A shift that frees cells near the end of the cache must not end the process.

Applying it reserves a worst-case graph where the freed cells are, and a micro-batch reaches
beyond the end from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Shift the last sequence below position zero in part, and decode."""
    player = lab.player(256, n_ubatch=64)
    player.fill({0: 224})
    player.fill({1: 32})
    # Its first 16 tokens fall below zero: the 16 cells from 224 on are free, the rest is shifted.
    player.shift(1, -1, -1, -16)
    player.check_cells()
    player.decode({0: 8})
    lab.verify(player)


SCENARIO = Scenario(
    id="reserve-abort-shift",
    kind="fix",
    claim="A shift that frees cells near the end of the cache is applied and returns.",
    issue="ggml-org/llama.cpp#13359",
    run=run,
    settings=PLAIN,
)
