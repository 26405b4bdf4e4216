"""Clients share a cache. Long prompts arrive while other clients decode, and free cells scatter.

Each client has a share of the cache, and the shares sum up to the cache. Every batch has enough
free cells, but rarely in one hole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.client_workload import SlotServer
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: Tokens of prompt and answer; a share is 64 cells. The first four sequences are interleaved.
REQUESTS = ((6, 58), (12, 51), (18, 44), (24, 37), (60, 4), (56, 8), (8, 24), (62, 2), (40, 24))


def run(lab: Lab) -> None:
    """Serve nine requests on four sequences, five of them in cells that others freed."""
    player = lab.player(256, n_batch=32)
    SlotServer(player, 4).serve(REQUESTS)
    lab.picture(player, "all answers")
    player.remove(0, 0, 16)
    lab.verify(player)


SCENARIO = Scenario(
    id="parallel-clients",
    kind="fix",
    claim="Clients that stay within their shares of a cache never lack cells.",
    issue="ollama/ollama#7949",
    run=run,
    settings=(CACHES[0], CACHES[3], CACHES[4], SCATTERED),
)
