"""Latent attention keeps one compressed row per token, which is key and value, and no V."""

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
    defrag(lab, player)
    player.decode({2: 20, 4: 8})
    lab.verify(player)
    player.fill({5: 80})
    player.remove(2)
    defrag(lab, player)
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-latent",
    kind="cure",
    claim="A cache without values is compacted like any other.",
    issue="ggml-org/llama.cpp#20993",
    run=run,
    model="latent",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
