"""Each sequence has a stream of cells, and each stream is compacted separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._compaction import attended, defrag, needed
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Compact on request, and at a threshold that one of two streams exceeds."""
    _on_request(lab)
    _after_the_moved_cells(lab)
    for sparse in (0, 1):
        _at_a_threshold(lab, sparse)


def _on_request(lab: Lab) -> None:
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


def _after_the_moved_cells(lab: Lab) -> None:
    """Decode into two streams, which continue after their own moved cells.

    `compaction` does not change where a search begins.
    """
    player = lab.player(4096, n_ubatch=128, n_batch=512, n_seq_max=4, kv_unified=False)
    if player.native.about.probes.get("defrag") == "compact":
        return
    player.fill({0: 140, 1: 150})
    player.remove(0, 0, 40)
    player.remove(1, 0, 42)
    player.defrag()
    player.decode({0: 8, 1: 8})
    snapshot = player.snapshot()
    for cells in snapshot.streams if snapshot is not None else ():
        lab.expect(
            cells.stats.used_max_p1 == cells.stats.used,
            f"after a defragmentation and a decode, {cells.stats.used} cells of stream "
            f"{cells.info.stream} are used, but not the first ones: up to cell "
            f"{cells.stats.used_max_p1 - 1}",
        )


def _at_a_threshold(lab: Lab, sparse: int) -> None:
    """Free most of one full stream of 2,048 cells, the smallest that the threshold covers."""
    player = lab.player(4096, n_ubatch=256, n_seq_max=2, kv_unified=False, defrag_thold=0.5)
    if player.info.n_streams != 2:
        return  # contiguous slots have one stream
    player.fill({0: 2048, 1: 2048})
    player.remove(sparse, 0, 2000)
    player.decode({sparse: 4})
    player.decode({sparse: 4})
    after = player.snapshot()
    lab.expect(
        after is None or attended(after) == needed(after),
        f"after an automatic compaction of stream {sparse}, attention visits "
        f"{attended(after) if after else []} cells, expected {needed(after) if after else []}",
    )
    player.remove(1 - sparse, 2040)  # `verify` decodes a token of each
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-streams",
    kind="fix",
    claim="Each stream is compacted, on request or at a threshold, after pending copies.",
    issue="ggml-org/llama.cpp#14363",
    run=run,
    settings=(CACHES[0], CACHES[3], CACHES[4], *MOVERS[:2]),
    environment=(),
)
