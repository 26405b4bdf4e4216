"""A sliding-window model has two caches, one of which drops cells outside of the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.memory_checks import check_searches, exercise_memory
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Run every operation on both caches, with the smallest and the full window cache."""
    for full in (False, True):
        player = lab.player(512, n_seq_max=4, swa_full=full)
        exercise_memory(lab, player, window=WINDOW)
        check_searches(lab, player)


SCENARIO = Scenario(
    id="memory-swa",
    kind="guard",
    claim="Both caches of a sliding-window model are correct after every operation.",
    issue="ggml-org/llama.cpp#13194",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[4], SCATTERED),
)
