"""Cells move while a shift is pending. Each key must still be rotated by its own distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Shift one of two interleaved sequences, then defragment, then decode both."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 64, 1: 64, 2: 64}, interleave=True)
    player.remove(2)
    player.remove(0, 4, 20)
    player.shift(0, 20, -1, -16)
    lab.picture(player, "before")
    player.defrag()
    lab.picture(player, "after")
    player.check_cells()
    player.decode({0: 8, 1: 8})
    lab.verify(player)
    # No shift is pending now, so the bytes must not change.
    player.remove(1, 4, 20)
    with player.unchanged():
        player.defrag()
    lab.verify(player)
    player.shift(0, 0, -1, 4)
    lab.logs()
    player.update()
    # llama.cpp logs the start of its own defragmentation at debug level.
    lines = [line for line in lab.logs(0) if "defragmenting" in line]
    lab.expect(not lines, f"an update that only shifts keys defragmented: {lines[:1]}")
    lab.verify(player)


SCENARIO = Scenario(
    id="shift-then-defrag",
    kind="guard",
    claim="A pending shift moves with its cells, and a shift after a defragmentation is correct.",
    issue="ggml-org/llama.cpp#14189",
    run=run,
)
