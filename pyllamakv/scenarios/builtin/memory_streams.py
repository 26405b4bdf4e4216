"""Every sequence has its own stream of cells, and a copy between streams copies data.

Contiguous slots (LLAMA_SET_ROWS=0 on 0.3.15 and 0.3.16) have no streams: llama.cpp then creates a
unified cache, and the context must report it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.memory_checks import exercise_memory
from pyllamakv.scenarios.scenario import CACHES, CONTIGUOUS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Run every operation on a cache of four streams."""
    lab.needs(Capability.KV_UNIFIED)
    exercise_memory(lab, lab.player(1024, n_seq_max=4, kv_unified=False))


SCENARIO = Scenario(
    id="memory-streams",
    kind="guard",
    claim="The streams of a cache are correct after every operation.",
    issue="ggml-org/llama.cpp#14363",
    run=run,
    model="grouped",
    settings=(CACHES[0], CACHES[3], CACHES[4], replace(CACHES[0], environment=CONTIGUOUS)),
    environment=(("LLAMA_SET_ROWS", "1"),),
)
