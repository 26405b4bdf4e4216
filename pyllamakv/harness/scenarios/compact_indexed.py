"""An indexer with keys of its own picks the cells to attend to: two caches with the same cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.harness.scenario import CACHES, MOVERS, Scenario
from pyllamakv.harness.scenarios._compacting import defrag

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab


def run(lab: Lab) -> None:
    """Leave every other sequence, at the end of the cache, compact it, and go on."""
    player = lab.player(1024, n_ubatch=64)
    player.fill({0: 500})
    player.fill(dict.fromkeys((1, 2, 3, 4), 60), interleave=True)
    for seq in (0, 1, 3):
        player.remove(seq)
    defrag(lab, player, rows=False)
    player.decode({2: 20, 4: 8})
    lab.verify(player)
    player.fill({5: 80})
    player.remove(2)
    defrag(lab, player, rows=False)
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-indexed",
    kind="cure",
    claim="A cache and the indexer that mirrors it move by one plan, cell for cell.",
    issue="ggml-org/llama.cpp#21149",
    run=run,
    model="indexed",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
