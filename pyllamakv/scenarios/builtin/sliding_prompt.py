"""Prompts longer than the window enter two fragmented caches, one batch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.scenarios import kv_rows, synthetic_models
from pyllamakv.scenarios.scenario import CACHES, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.runtime.snapshot import CellMap
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

WINDOW = synthetic_models.SHAPES["sliding"].window


def run(lab: Lab) -> None:
    """Decode prompts of several micro-batches. The last one reuses cells outside of the window."""
    player = lab.player(512, n_ubatch=32, n_seq_max=7)
    player.fill(dict.fromkeys(range(6), 48), interleave=True)
    for seq in (1, 3):
        player.remove(seq)
    with player.unchanged("a long decode", window=WINDOW):
        player.decode({0: 100})
    player.check_windows(WINDOW)
    with player.unchanged("two long decodes in a batch", window=WINDOW):
        player.decode({1: 60, 2: 40})
    player.check_windows(WINDOW)
    lab.picture(player, "after")
    lab.verify(player)
    player.remove(0)
    player.decode({6: player.free - 1})
    player.check_windows(WINDOW)
    lab.verify(player)
    _refused_then_cut(lab)
    _masked_cells(lab)
    _masked_by_the_batch(lab)
    _not_defragmented_later(lab)


def _refused_then_cut(lab: Lab) -> None:
    """Refuse a batch, and remove tokens: the windows then contain cells that were outside.

    Two sequences share most cells, which therefore cannot be reused. Where the window has a cache
    of its own, the batch finds no cells there, even if all others outside of the windows are freed.
    """
    player = lab.player(512, n_ubatch=96, n_seq_max=4)
    player.fill({0: 150})
    player.copy(0, 1)
    player.fill({2: 60})
    refused = player.decode({3: 96}, expect=None) == DecodeStatus.NO_SLOT
    if refused:
        for seq in (0, 1, 2):
            player.remove(seq, player.ledger.next(seq) - 20)
    player.check_windows(WINDOW)
    lab.note(refused=refused)
    lab.verify(player)


def _masked_cells(lab: Lab) -> None:
    """Decode as many tokens as cells are free, and then as many as can be used, but not one more.

    In the sliding-window cache, the free cells are in two holes, and every cell outside of a window
    is between two others. Cells of two sequences cannot be reused.
    """
    player = lab.player(512, n_ubatch=64, n_seq_max=6)
    cells = _window_cells(player)
    if cells is None or len(cells) >= player.n_cells:
        return
    # The other tokens take 115 cells, and 31 remain free.
    player.fill({0: len(cells) - 146})
    player.copy(0, 1)
    player.fill({2: 56, 3: 28}, interleave=True)
    player.fill({5: 16})
    player.fill({4: 31})
    player.remove(5)
    before, (free, _) = _positions(player), _usable(player)
    player.decode({5: free})
    player.check_windows(WINDOW)
    player.remove(5)
    after = _positions(player)
    # Scattered slots use the first cells that are free or outside of a window.
    lab.expect(
        after == before or not player.info.contiguous_slots,
        f"a batch of {free} tokens removed older ones from the sliding-window cache, although "
        f"{free} cells were free",
    )
    free, masked = _usable(player)
    player.decode({5: free + masked + 1}, expect=DecodeStatus.NO_SLOT)
    lab.expect(
        _positions(player) == after,
        "a batch that found no slot removed tokens from the sliding-window cache",
    )
    player.decode({5: free + masked})
    player.check_windows(WINDOW)
    player.remove(5)
    lab.note(free=free, masked=masked)
    lab.verify(player)


def _masked_by_the_batch(lab: Lab) -> None:
    """Decode more tokens than cells are free: the second micro-batch reuses cells of the first.

    The first one takes all free cells of the sliding-window cache, which are in two holes.
    """
    player = lab.player(512, n_ubatch=64, n_seq_max=6)
    cells = _window_cells(player)
    if cells is None or len(cells) >= player.n_cells:
        return
    # The other tokens take 62 cells, and 64 remain free. Cells of two sequences cannot be reused.
    player.fill({0: len(cells) - 126})
    player.copy(0, 1)
    player.fill({5: 32})
    player.fill({2: 31})
    player.fill({3: 31})
    player.remove(5)
    player.decode({5: 64 + 64 - WINDOW + 1})
    player.check_windows(WINDOW)
    player.remove(5)
    lab.verify(player)


def _not_defragmented_later(lab: Lab) -> None:
    """Decode a batch that finds slots only if it is split by sequence, then a small one.

    llama.cpp tries both splits. The first batch needs no defragmentation, and neither does the
    second one, although cells have become free in between.
    """
    player = lab.player(256, n_ubatch=32, n_seq_max=12)
    for seq in (0, 1, 2, 3):
        player.fill({seq: 28})
    player.fill({8: 16})
    for seq in (4, 5, 6, 7):
        player.fill({seq: 28})
    player.remove(8)
    player.decode({9: 24, 10: 8})
    player.remove(1)
    player.remove(9)
    before = player.counters()
    player.decode({11: 8})
    after = player.counters()
    if before is not None and after is not None:
        defrags = (after - before).defrags
        lab.expect(defrags <= 0, f"a decode of 8 tokens defragmented {defrags} times")
    player.check_windows(WINDOW)
    lab.verify(player)


def _window_cells(player: Player) -> CellMap | None:
    """Return the cells of the sliding-window cache, or None if there is none."""
    snapshot = player.snapshot()
    found = [] if snapshot is None else [cells for cells in snapshot.streams if cells.swa]
    return found[0] if len(found) == 1 else None


def _positions(player: Player) -> dict[int, list[int]]:
    """Return the positions of each sequence in the sliding-window cache."""
    snapshot = player.snapshot()
    found = None if snapshot is None else kv_rows.sliding(snapshot)
    return {seq: sorted(pos) for seq, pos in (found or {}).items()}


def _usable(player: Player) -> tuple[int, int]:
    """Return the numbers of free cells and of cells that the window masks, if not shared."""
    cells = _window_cells(player)
    assert cells is not None
    masked = 0
    for seq in np.flatnonzero(cells.counts).tolist():
        own = cells.has(seq)
        oldest = cells.pos[own].max() + 1 - WINDOW
        masked += int(np.count_nonzero(own & (cells.sharers == 1) & (cells.pos <= oldest)))
    return cells.stats.free, masked


SCENARIO = Scenario(
    id="sliding-prompt",
    kind="guard",
    claim=(
        "A prompt longer than the window finds its cells in both caches and is evaluated correctly."
    ),
    issue="ollama/ollama#10127",
    run=run,
    model="sliding",
    settings=(CACHES[0], CACHES[3], CACHES[4], SCATTERED),
)
