"""Clients share a cache: long prompts arrive while others answer, and the free cells scatter.

A server promises each client its share, and all shares together are the cache. There is room for
every batch, but rarely in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.client_workload import SlotServer
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: Tokens of prompt and answer; a share is 64. The first four lie token by token among each other.
REQUESTS = ((6, 58), (12, 51), (18, 44), (24, 37), (60, 4), (56, 8), (8, 24), (62, 2), (40, 24))


def run(lab: Lab) -> None:
    """Answer nine requests on four sequences, five of them on ground that others left."""
    player = lab.player(256, n_batch=32)
    SlotServer(player, 4).serve(REQUESTS)
    lab.picture(player, "all answers")
    player.remove(0, 0, 16)
    lab.verify(player)


SCENARIO = Scenario(
    id="parallel-clients",
    kind="fix",
    claim="Clients that keep to their shares of a cache are all served.",
    issue="ollama/ollama#7949",
    run=run,
    settings=(CACHES[0], CACHES[3], CACHES[4], SCATTERED),
)
