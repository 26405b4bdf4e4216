"""Multi-head latent attention keeps narrow rows, in later releases without any V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.memory_checks import exercise_memory
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Do everything to a cache of latent rows."""
    exercise_memory(lab, lab.player(256, n_seq_max=4))


SCENARIO = Scenario(
    id="memory-mla",
    kind="guard",
    claim="Latent rows are right after all that can be done to them.",
    issue="ggml-org/llama.cpp#12801",
    run=run,
    model="latent",
    settings=(CACHES[0], CACHES[1], CACHES[3], SCATTERED),
)
