"""A sequence is left alone at the end of the cache: attention runs over all that lies before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.harness.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab
    from pyllamakv.runtime.snapshot import Snapshot

#: Attention runs over a multiple of so many cells.
STEP = 256


def run(lab: Lab) -> None:
    """Empty the cache below two sequences, compact it, and decode both and a third."""
    player = lab.player(2048, n_ubatch=128)
    player.fill({0: 1600})
    player.fill({1: 40, 2: 40}, interleave=True)
    player.fill({3: 200})
    player.remove(0)
    player.remove(2)
    before = lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    after = lab.picture(player, "after")
    if before is not None and after is not None:
        live = player.ledger.used
        lab.note(attended_before=attended(before), attended_after=attended(after), live=live)
        lab.expect(
            attended(after) == -(-live // STEP) * STEP,
            f"attention runs over {attended(after)} cells for {live} live ones",
        )
    player.decode({1: 8, 3: 8})
    player.fill({4: 300})
    lab.verify(player)
    # The place that was emptied is used again, and a second compaction finds what that left.
    player.remove(3)
    with player.unchanged():
        player.defrag()
    lab.verify(player)


def attended(snapshot: Snapshot) -> int:
    """Return how many cells attention runs over, in the stream where it runs furthest."""
    return max(-(-each.stats.used_max // STEP) * STEP for each in snapshot.streams if not each.swa)


SCENARIO = Scenario(
    id="compact-then-decode",
    kind="cure",
    claim="What is alone in the cache is attended to at the cost of its own cells.",
    issue="ggml-org/llama.cpp#20993",
    run=run,
    settings=(*CACHES, *MOVERS),
)
