"""A prompt of several micro-batches meets a sliding-window cache that has just enough cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Status
from pyllamakv.harness import synthetic
from pyllamakv.harness.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab

WINDOW = synthetic.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Fail a long decode, then decode as much as fits: windows stay whole, logits are right."""
    # Cells of the small cache: windows of all sequences and one micro-batch, a multiple of 256.
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    player.fill(dict.fromkeys(range(6), 48), interleave=True)
    player.check_windows(WINDOW)
    if "fail" in __import__("os").environ.get("WK", "fail"):
        with player.unchanged("a decode that fails", window=WINDOW):
            player.decode({0: 240}, expect=Status.NO_SLOT)
        player.check_windows(WINDOW)
    player.decode({0: 100})
    player.check_windows(WINDOW)
    lab.verify(player)
    player.decode({1: 60, 2: 40})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="window-kept",
    kind="cure",
    claim="Until a decode has succeeded, no token leaves a window that another one looks through.",
    issue="ggml-org/llama.cpp#13746",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], SCATTERED),
)
