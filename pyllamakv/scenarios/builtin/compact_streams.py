"""Each sequence has a stream of cells, and each stream is compacted separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._compaction import defrag
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Leave the end of two streams and all of a third, copy one completely, and compact."""
    player = lab.player(4096, n_ubatch=128, n_batch=512, n_seq_max=4, kv_unified=False)
    player.fill({0: 700, 1: 700, 2: 100})
    player.remove(0, 0, 600)
    player.remove(1, 300, 500)
    defrag(lab, player)
    player.decode({0: 8, 1: 8, 2: 8})
    # The copy of a stream is pending until the next update, which makes it before cells move.
    player.remove(1, 0, 300)
    player.copy(1, 3)
    defrag(lab, player, rows=False)
    player.decode({1: 4, 3: 4})
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-streams",
    kind="fix",
    claim="Streams are compacted separately, after pending copies between them.",
    issue="ggml-org/llama.cpp#14363",
    run=run,
    settings=(CACHES[0], CACHES[3], CACHES[4], *MOVERS[:2]),
    environment=(),
)
