"""A sequence is left alone at the end of the cache: attention runs over all that lies before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.harness.scenario import CACHES, MOVERS, ORDERED, SCATTERED, Scenario
from pyllamakv.harness.scenarios._compacting import defrag

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab


def run(lab: Lab) -> None:
    """Empty the cache below two sequences, compact it, and decode both and a third."""
    player = lab.player(2048, n_ubatch=128)
    player.fill({0: 1600})
    player.fill({1: 40, 2: 40}, interleave=True)
    player.fill({3: 200})
    player.remove(0)
    player.remove(2)
    defrag(lab, player)
    player.decode({1: 8, 3: 8})
    player.fill({4: 300})
    lab.verify(player)
    # The place that was emptied is used again, and a second compaction finds what that left.
    player.remove(3)
    defrag(lab, player)
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-then-decode",
    kind="cure",
    claim="What is alone in the cache is attended to at the cost of its own cells.",
    issue="ggml-org/llama.cpp#20993",
    run=run,
    settings=(*CACHES, *MOVERS, *ORDERED, SCATTERED),
)
