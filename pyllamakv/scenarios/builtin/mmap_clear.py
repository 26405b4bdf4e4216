"""A cleared cache commits no memory and works like a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._mapped_memory import committed, expect_committed_below, mapped
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fill a cache, clear it, and use it again; save a sequence across a clear."""
    player = mapped(lab, 4096, n_batch=512, n_ubatch=128)
    # Use the last cell too: bytes after it must not be read.
    player.fill({0: 1500, 1: 300, 2: 4096 - 1800})
    player.save(1, "kept")
    player.clear()
    lab.expect(committed(player) == 0, f"{committed(player)} bytes are resident after a clear")
    player.check_cells()
    player.restore(1, "kept")
    player.decode({1: 8, 3: 40})
    expect_committed_below(lab, player, 348 + 256, "after a restore and a decode")
    lab.verify(player)


SCENARIO = Scenario(
    id="mmap-clear",
    kind="feature",
    claim="Clearing a cache returns all of its memory to the system instead of writing zeros.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    settings=CACHES,
)
