"""A sliding-window model has two caches with different cells. Each needs a plan of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.builtin._compaction import defrag
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Fill five sequences beyond their windows, remove the first ones, and compact."""
    player = lab.player(1024, n_ubatch=32)
    player.fill({0: 500})
    player.fill(dict.fromkeys((1, 2, 3, 4), 80), interleave=True)
    for seq in (0, 1, 3):
        player.remove(seq)
    defrag(lab, player, window=WINDOW)
    player.check_windows(WINDOW)
    player.decode({2: 40, 4: 8})
    lab.verify(player)
    player.remove(2)
    player.fill({5: 100})
    defrag(lab, player, window=WINDOW)
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="compact-swa",
    kind="fix",
    claim="The full cache and the sliding-window cache are both compacted, each by its own plan.",
    issue="ggml-org/llama.cpp#13194",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], *MOVERS[:2]),
)
