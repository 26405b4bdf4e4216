"""Multi-head latent attention stores narrow rows, and no V tensor in later releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.memory_checks import exercise_memory
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Run every operation on a cache of latent rows."""
    exercise_memory(lab, lab.player(256, n_seq_max=4))


SCENARIO = Scenario(
    id="memory-mla",
    kind="guard",
    claim="The latent rows of a cache are correct after every operation.",
    issue="ggml-org/llama.cpp#12801",
    run=run,
    model="latent",
    settings=(CACHES[0], CACHES[1], CACHES[3], SCATTERED),
)
