"""A hybrid model has cells for its attention layers and states for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.memory_checks import (
    check_searches,
    exercise_memory,
    require_deterministic,
    verify_memory,
)
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Run every operation on a hybrid memory, then a batch of several micro-batches."""
    player = lab.player(256, n_ubatch=32, n_seq_max=4)
    require_deterministic(lab, player)
    exercise_memory(lab, player)
    player.decode({0: 80, 2: 80}, interleave=True)
    verify_memory(lab, player)
    check_searches(lab, player)


SCENARIO = Scenario(
    id="memory-hybrid",
    kind="guard",
    claim="Cells and states of a hybrid model stay consistent through every operation.",
    issue="ggml-org/llama.cpp#19794",
    run=run,
    model="hybrid",
    settings=(CACHES[0], CACHES[4], SCATTERED),
)
