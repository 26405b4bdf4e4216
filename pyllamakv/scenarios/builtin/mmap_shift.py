"""A shift rotates the used cells and does not touch the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._mapped_memory import (
    committed,
    expect_committed_below,
    mapped,
    must_shift,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Remove the start of two sequences in a large cache, shift them, and decode."""
    player = mapped(lab, 32768, n_batch=512, n_ubatch=64)
    must_shift(player)
    player.fill({0: 200})
    player.fill({1: 200})
    before = committed(player)
    for seq in (0, 1):
        player.remove(seq, 0, 50)
        player.shift(seq, 50, -1, -50)
    player.update()
    lab.expect(
        committed(player) <= before,
        f"a shift of 400 tokens increased resident memory by {committed(player) - before} bytes",
    )
    player.decode({0: 20, 1: 20})
    expect_committed_below(lab, player, 440 + 256, "after a shift")
    lab.verify(player)
    # No cell is left to shift, but a shift is still pending.
    player.shift(0, 0, -1, 3)
    player.remove(0)
    player.remove(1)
    player.update()
    player.decode({2: 30})
    lab.verify(player)


SCENARIO = Scenario(
    id="mmap-shift",
    kind="feature",
    claim="A shift commits no pages of unused cells.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    settings=CACHES,
)
