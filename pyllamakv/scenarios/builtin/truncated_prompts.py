"""Prompts exceed a client's share slightly, are truncated to it, and fill the cache completely.

Each client has no free cell from its first token: half of its share is dropped while the next
prompt arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.client_workload import SlotServer
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Serve four clients whose prompts are four tokens longer than their shares."""
    player = lab.player(256, n_batch=32)
    server = SlotServer(player, 4)
    long = server.share + 4
    server.serve([(long, 10), (30, 40), (long, 50), (36, 42), (long, 5), (long, 20), (long, 3)])
    lab.picture(player, "all answers")
    lab.note(truncated=server.truncated, shifted=server.shifted)
    player.remove(0, 0, 16)
    lab.verify(player)


SCENARIO = Scenario(
    id="truncated-prompts",
    kind="fix",
    claim=(
        "Prompts truncated to a share, and shares that drop their oldest half, never lack cells."
    ),
    issue="ollama/ollama#7930",
    run=run,
    settings=(CACHES[0], CACHES[3], SCATTERED),
)
