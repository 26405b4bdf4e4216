"""Every sequence has a stream of cells of its own; a copy between streams is a real one.

Contiguous slots (LLAMA_SET_ROWS=0 on 0.3.15 and 0.3.16) have no streams: llama.cpp then makes a
unified cache, and the context has to report it.
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
    """Do everything to a cache of four streams."""
    lab.needs(Capability.KV_UNIFIED)
    exercise_memory(lab, lab.player(1024, n_seq_max=4, kv_unified=False))


SCENARIO = Scenario(
    id="memory-streams",
    kind="guard",
    claim="The streams of a cache are right after all that can be done to them.",
    issue="ggml-org/llama.cpp#14363",
    run=run,
    model="grouped",
    settings=(CACHES[0], CACHES[3], CACHES[4], replace(CACHES[0], environment=CONTIGUOUS)),
    environment=(("LLAMA_SET_ROWS", "1"),),
)
