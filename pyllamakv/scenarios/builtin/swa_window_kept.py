"""A batch of several micro-batches enters a sliding-window cache with just enough cells.

llama.cpp places the whole batch before it computes the first token. The first micro-batch needs
cells that the last one does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import Capability, DecodeStatus
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

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
    _out_of_order(lab)
    _shared(lab)
    _streams(lab)
    _equal_positions(lab)


def _out_of_order(lab: Lab) -> None:
    """Let a micro-batch reuse cells in another order than that of their positions.

    In order of their cells, the sequence has the positions 0, 20 to 31, 1, 2 to 19. The second
    micro-batch reuses the first 14 of these cells. That removes the positions up to 31, all of
    which the first micro-batch sees.
    """
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    if not _window_cells(player):
        return
    rest = _window_cells(player) - 32 - 5 * (WINDOW - 1) - 50
    player.decode({0: 1})
    player.decode({6: 12})
    player.decode({0: 1})
    player.decode({0: 18})
    # No window has passed these cells.
    for seq in range(1, 6):
        player.decode({seq: WINDOW - 1})
    player.decode({6: rest})
    player.remove(6, 0, 12)
    player.decode({0: 12})
    _decode_all(lab, player, {0: 64})


def _shared(lab: Lab) -> None:
    """Remove shared cells of a window by a batch that reuses one cell after them.

    Two sequences share 40 cells. The second micro-batch of one reuses its cell at position 40,
    which removes the sequence from the shared cells, and the first one sees those.
    """
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    cells = _window_cells(player)
    if not cells:
        return
    player.decode({0: 40})
    player.copy(0, 1)
    left = cells - 40 - 63
    for seq in range(2, 7):
        player.decode({seq: min(left, WINDOW - 1)})
        left -= min(left, WINDOW - 1)
    _decode_all(lab, player, {0: 64})


def _streams(lab: Lab) -> None:
    """Decode two sequences with a stream each, of which the second has cells out of order.

    After a shift, the search starts at the first cell. The first micro-batch reuses 16 masked cells
    of the second stream; the next 8 cells have the positions 193 to 200. Their reuse by the second
    micro-batch removes the positions up to 200, and the first one sees those from 185 on.
    """
    if not lab.native.about.capabilities & Capability.KV_UNIFIED:
        return
    player = lab.player(512, n_ubatch=32, n_seq_max=2, kv_unified=False)
    if player.info.n_streams != 2 or not player.info.can_shift:
        return  # contiguous slots have one stream
    player.fill({0: 216, 1: 216})
    player.shift(1, 16, 24, 1000)
    player.shift(1, 24, 201, -8)
    player.shift(1, 1016, 1024, -823)
    player.update()
    _decode_all(lab, player, {0: 32, 1: 32})


def _window_cells(player: Player) -> int:
    """Return the number of cells of the sliding-window cache, or 0 without one."""
    snapshot = player.snapshot()
    windows = [each for each in snapshot.streams if each.swa] if snapshot is not None else []
    return windows[0].stats.size if windows else 0


def _decode_all(lab: Lab, player: Player, feeds: dict[int, int]) -> None:
    """Decode a batch, and compare the logits of all its tokens; it may find no slot."""
    batch = player.feed(feeds)
    batch = replace(batch, logits=np.ones_like(batch.logits))
    lab.note(last=player.decode(batch, expect=None))
    player.check_windows(WINDOW)
    lab.verify(player)


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
