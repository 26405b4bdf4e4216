"""A hybrid model whose indexer selects pools of cells, and keeps their indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.memory_checks import (
    exercise_memory,
    require_deterministic,
    supported,
    verify_memory,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Run every operation, then a batch of several micro-batches and copies onto a sequence."""
    # In a unified cache of 0.3.36, the cells of other sequences change what is selected.
    player = lab.player(1024, n_ubatch=32, n_seq_max=4, kv_unified=False)
    require_deterministic(lab, player)
    exercise_memory(lab, player, rows=False, moves=False)
    player.decode({0: 80, 2: 60}, interleave=True)
    player.copy(0, 3)
    player.fill({0: 6, 3: 3})
    verify_memory(lab, player, rows=False)
    lab.expect(not supported(player.defrag), "cells moved without the indexes of the pools")
    verify_memory(lab, player, rows=False)


SCENARIO = Scenario(
    id="memory-hybrid-indexer",
    kind="guard",
    claim="Cells, states and pools of an indexer stay consistent through every operation.",
    issue="ggml-org/llama.cpp#27742",
    run=run,
    model="pooled",
    settings=(CACHES[0], CACHES[3]),
    environment=(),
)
