"""Compressed rows summarize blocks of tokens that have left the window. No cell describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.memory_checks import (
    exercise_memory,
    require_deterministic,
    supported,
    verify_memory,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["compressed"].window


def run(lab: Lab) -> None:
    """Run every operation, then those of sequences that are longer than the longest block."""
    lab.logs()
    player = lab.player(256, n_ubatch=32, n_seq_max=4)
    mapped = lab.setting.environment and lab.native.about.capabilities & Capability.MAPPING
    warnings = [line for line in lab.logs() if "is allocated on the heap" in line]
    lab.expect(
        len(warnings) == bool(mapped),
        f"{len(warnings)} warnings that the cache is on the heap: {warnings}",
    )
    require_deterministic(lab, player)
    exercise_memory(lab, player, window=WINDOW, rows=False, moves=False)
    player.fill({0: 150, 2: 70}, interleave=True)
    # The source of a copy ends before the next decode.
    player.copy(0, 3)
    player.remove(0)
    player.fill({0: 30, 3: 20})
    player.save(3, "kept")
    player.remove(3)
    player.restore(1, "kept")
    player.copy(1, 3)
    player.copy(2, 1)
    player.fill({1: 9, 2: 3, 3: 5})
    verify_memory(lab, player, WINDOW, rows=False)
    lab.expect(not supported(player.defrag), "cells moved without the compressed rows")
    verify_memory(lab, player, WINDOW, rows=False)


SCENARIO = Scenario(
    id="memory-compressed",
    kind="guard",
    claim="Compressed rows are correct after every operation, and the cells beside them stay.",
    issue="ggml-org/llama.cpp#25521",
    run=run,
    model="compressed",
    settings=(
        CACHES[0],
        CACHES[3],
        # Mapped memory would lose the rows: the cache stays on the heap.
        replace(CACHES[0], environment=(("LLAMA_KV_BACKING", "mmap"),)),
    ),
    environment=(),
)
