"""A hybrid model whose attention layers have a window has two caches, and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.memory_checks import (
    check_searches,
    exercise_memory,
    require_deterministic,
    verify_memory,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["hybrid-sliding"].window


def run(lab: Lab) -> None:
    """Run every operation on caches and states, then a batch of several micro-batches."""
    player = lab.player(256, n_ubatch=32, n_seq_max=4)
    require_deterministic(lab, player)
    # The model has no layer without a window. llama.cpp aborts when it shifts the empty cache.
    exercise_memory(lab, player, window=WINDOW, rows=False, shifts=False)
    player.decode({0: 80, 2: 60}, interleave=True)
    verify_memory(lab, player, WINDOW, rows=False)
    check_searches(lab, player)


SCENARIO = Scenario(
    id="memory-hybrid-swa",
    kind="guard",
    claim="Both caches and the states of a hybrid model are correct after every operation.",
    issue="ggml-org/llama.cpp#18601",
    run=run,
    model="hybrid-sliding",
    settings=(CACHES[0], CACHES[3]),
    environment=(),
)
