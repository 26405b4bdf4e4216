"""An indexer selects blocks of positions. Maps from positions to cells locate them in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._compaction import defrag, defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Compact a unified cache, then streams. Blocks are selected only with streams."""
    defrag_sparse_tail(lab, rows=False)
    player = lab.player(2048, n_ubatch=128, n_batch=512, n_seq_max=2, kv_unified=False)
    player.fill({0: 500, 1: 300})
    player.remove(0, 0, 400)
    player.remove(1, 100, 200)
    defrag(lab, player, rows=False)
    player.decode({0: 8, 1: 8})
    player.decode({0: 1, 1: 1})
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-block-sparse",
    kind="fix",
    claim=(
        "After a compaction, the maps from position blocks to cells are valid, and the "
        "indexer's cache has moved too."
    ),
    issue="ggml-org/llama.cpp#26338",
    run=run,
    model="blocks",
    settings=(CACHES[0], CACHES[3], *MOVERS[:2]),
    environment=(),
)
