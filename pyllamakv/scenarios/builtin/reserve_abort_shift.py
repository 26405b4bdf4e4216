"""A shift that frees cells near the end of the cache must not end the process.

Applying it reserves a worst-case graph at the freed cells, and a micro-batch there extends past the
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Shift part of the last sequence below position zero, and decode."""
    player = lab.player(256, n_ubatch=64)
    player.fill({0: 224})
    player.fill({1: 32})
    # The first 16 tokens fall below zero: 16 cells from 224 are freed, the rest is shifted.
    player.shift(1, -1, -1, -16)
    player.check_cells()
    player.decode({0: 8})
    lab.verify(player)


SCENARIO = Scenario(
    id="reserve-abort-shift",
    kind="fix",
    claim="A shift that frees cells near the end of the cache does not abort the process.",
    issue="ggml-org/llama.cpp#13359",
    run=run,
    settings=PLAIN,
)
