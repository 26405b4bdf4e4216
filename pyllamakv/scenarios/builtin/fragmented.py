"""Two sequences alternate cell by cell, one is removed, and a batch needs more than one cell.

Half of the cache is free, and its largest hole is one cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import CACHES, MOVERS, ORDERED, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Decode into a cache with enough free cells, no two of them adjacent."""
    player = lab.player(256)
    player.fill({0: 128, 1: 128}, interleave=True)
    player.remove(1)
    lab.picture(player, "before")
    lab.logs()
    with player.unchanged("the decode"):
        player.decode({0: 16})
    lines = lab.logs()
    lab.expect(not lines, f"a decode that found its cells logged: {lines[0] if lines else ''}")
    lab.picture(player, "after")
    # Use all free cells but one, which `verify` needs, in one call.
    player.decode({2: 111})
    lab.verify(player)


SCENARIO = Scenario(
    id="fragmented",
    kind="fix",
    claim="A decode succeeds if enough cells are free, however scattered they are.",
    issue="ollama/ollama#7545",
    run=run,
    settings=(*CACHES, *MOVERS, *ORDERED, SCATTERED),
    record_frames=True,
)
