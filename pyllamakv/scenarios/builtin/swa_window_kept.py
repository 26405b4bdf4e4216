"""A batch of several micro-batches enters a sliding-window cache with just enough cells.

llama.cpp places the whole batch before it computes the first token. The first micro-batch needs
cells that the last one does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

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
        # With contiguous slots, all micro-batches need their slots at once.
        player.check_windows(WINDOW)
        lab.verify(player)
        player.decode({1: 60})
        player.decode({2: 40})
    player.check_windows(WINDOW)
    lab.verify(player)
    _equal_positions(lab)


def _equal_positions(lab: Lab) -> None:
    """Give twelve tokens each position, and decode a batch that reuses the cell of one token.

    The first micro-batch takes the cells before the twelve, and sees all of them. The second one
    starts its search at the first of the twelve, which no window shows any more. Both caches must
    have the same size: otherwise llama.cpp refuses to change positions.
    """
    player = lab.player(256, n_ubatch=32)
    if not player.info.can_shift:
        return
    player.fill({1: 32})
    player.fill({0: 48})
    player.remove(1)
    player.divide(0, -1, -1, 12)
    batch = player.feed({0: 33})
    player.decode(replace(batch, logits=np.ones_like(batch.logits)))
    lab.verify(player)


SCENARIO = Scenario(
    id="swa-window-kept",
    kind="fix",
    claim="Every token of a batch sees its whole window, however many tokens follow it.",
    issue="ggml-org/llama.cpp#13746",
    run=run,
    model="sliding",
    # The last one is the quick setting: some releases cannot shift quantized keys.
    settings=(CACHES[0], CACHES[4], CACHES[3]),
    # With scattered slots (0.3.12 and later), only the windows matter.
    environment=(("LLAMA_SET_ROWS", "1"),),
)
