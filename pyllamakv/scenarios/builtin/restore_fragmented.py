"""A saved sequence is restored into a cache whose free cells are scattered.

Part of the sequence is still in the cache: cells that only it uses, which count as free, and cells
that another sequence shares, which do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Restore as many tokens as there are free cells, over the remains of the sequence."""
    player = lab.player(256)
    player.fill({2: 64})
    player.copy(2, 3, 0, 24)
    player.save(2, "kept")
    saved = player.rows()
    player.remove(2, 32)
    player.fill({0: 112, 1: 112}, interleave=True)
    player.remove(1, 0, 56)
    lab.picture(player, "before")
    with player.unchanged("the restore"):
        player.restore(2, "kept")
    lab.picture(player, "after")
    kv_rows.compare(saved, player.rows(), "the restore")
    player.check_cells()
    player.remove(1, 56, 64)
    lab.verify(player)
    _beyond_the_window(lab)


def _beyond_the_window(lab: Lab) -> None:
    """Restore more tokens than attention visits cells: the others are free as well.

    240 cells alternate, every second one is freed, and 272 follow. No hole has 300 cells.
    """
    player = lab.player(512)
    player.fill({2: 300})
    player.save(2, "kept")
    saved = player.rows()
    player.remove(2)
    player.fill({0: 120, 1: 120}, interleave=True)
    player.remove(1)
    player.restore(2, "kept")
    kv_rows.compare(saved, player.rows(), "the restore")
    lab.verify(player)


SCENARIO = Scenario(
    id="restore-fragmented",
    kind="fix",
    claim="A saved sequence can be restored if enough cells are free.",
    issue="ggml-org/llama.cpp#17527",
    run=run,
    settings=(*CACHES, SCATTERED),
)
