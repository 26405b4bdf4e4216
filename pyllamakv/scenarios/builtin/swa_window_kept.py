"""A batch of several micro-batches meets a sliding-window cache that has just enough cells.

It is placed as a whole before its first token is computed. What its last micro-batch does not see
any more, its first one still needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Fill all windows, then decode batches of three and four micro-batches."""
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    player.fill(dict.fromkeys(range(6), 48), interleave=True)
    player.check_windows(WINDOW)
    player.decode({0: 100})
    player.check_windows(WINDOW)
    lab.verify(player)
    if player.decode({1: 60, 2: 40}, expect=None) == DecodeStatus.NO_SLOT:
        # Where a slot is one hole, all micro-batches need theirs at once.
        player.check_windows(WINDOW)
        lab.verify(player)
        player.decode({1: 60})
        player.decode({2: 40})
    player.check_windows(WINDOW)
    lab.verify(player)


SCENARIO = Scenario(
    id="swa-window-kept",
    kind="fix",
    claim="A token sees its whole window, however many come after it in the same batch.",
    issue="ggml-org/llama.cpp#13746",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4]),
    # Where slots need not be one hole (0.3.12 and later) this is about windows alone.
    environment=(("LLAMA_SET_ROWS", "1"),),
)
