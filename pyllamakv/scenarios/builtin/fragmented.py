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
    lab.expect(not lines, f"a successful decode logged: {lines[0] if lines else ''}")
    lab.picture(player, "after")
    # Use all free cells but one, which `verify` needs, in one call.
    player.decode({2: 111})
    lab.verify(player)
    _beyond_the_window(lab)
    _after_the_moved_cells(lab)


def _beyond_the_window(lab: Lab) -> None:
    """Use cells that attention does not visit yet: they are free as well.

    200 cells are used, 40 of them are freed one by one, and 56 follow. No hole has 80 cells.
    """
    player = lab.player(256, n_ubatch=128)
    player.fill({0: 40, 1: 40}, interleave=True)
    player.fill({0: 120})
    player.remove(1)
    player.decode({2: 80})
    lab.verify(player)


def _after_the_moved_cells(lab: Lab) -> None:
    """Decode after a defragmentation: attention visits cells up to the last used one."""
    player = lab.player(256)
    player.fill({0: 16, 1: 16}, interleave=True)
    player.fill({0: 96})
    player.remove(1)
    player.decode({0: 8})
    player.defrag()
    player.decode({2: 8})
    snapshot = player.snapshot()
    if snapshot is not None:
        stats = snapshot.stats
        lab.expect(
            stats.used_max_p1 == stats.used,
            f"after a defragmentation and a decode, {stats.used} cells are used, but not the "
            f"first ones: up to cell {stats.used_max_p1 - 1}",
        )
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
