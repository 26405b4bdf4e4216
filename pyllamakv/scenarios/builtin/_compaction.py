"""Helpers for compaction scenarios: the cells that attention visits and those that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import ScenarioFailed, Unsupported
from pyllamakv.scenarios.memory_checks import check_searches

if TYPE_CHECKING:
    from pyllamakv.runtime.snapshot import Snapshot
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: llama.cpp pads the cells that attention visits to a multiple of this.
STEP = 256


def attended(snapshot: Snapshot) -> list[int]:
    """Return the number of cells that attention visits, per stream of each cache."""
    return [-(-each.stats.used_max_p1 // STEP) * STEP for each in snapshot.streams]


def needed(snapshot: Snapshot) -> list[int]:
    """Return the number of cells that attention needs to visit, per stream of each cache."""
    return [-(-each.stats.used // STEP) * STEP for each in snapshot.streams]


def defrag_sparse_tail(lab: Lab, *, rows: bool = True) -> None:
    """Keep every second sequence, at the end of the cache, compact, and decode; repeat once.

    ``rows``: see `defrag`.
    """
    player = lab.player(1024, n_ubatch=64)
    player.fill({0: 500})
    player.fill(dict.fromkeys((1, 2, 3, 4), 60), interleave=True)
    for seq in (0, 1, 3):
        player.remove(seq)
    before = player.snapshot()
    player.decode({2: 2})
    after = player.snapshot()
    if before is not None and after is not None:
        moved = before.moves_to(after).cells
        lab.expect(moved == 0, f"a decode that had found a slot moved {moved} cells")
    defrag(lab, player, rows=rows)
    player.decode({2: 20, 4: 8})
    lab.verify(player)
    check_searches(lab, player)
    player.fill({5: 80})
    player.remove(2)
    defrag(lab, player, rows=rows)
    lab.verify(player)


def defrag(lab: Lab, player: Player, *, window: int = 0, rows: bool = True) -> None:
    """Defragment, and check that only the indexes of cells have changed.

    With ``rows`` False, bytes are not compared, for memory whose states contain more than rows.
    """
    before = lab.picture(player, "before")
    counted = player.counters()
    if rows:
        with player.unchanged(window=window):
            _defrag(lab, player)
    else:
        _defrag(lab, player)
    after = lab.picture(player, "after")
    player.check_cells()
    if before is None or after is None:
        return
    moves = before.moves_to(after)
    lab.notes.setdefault("compactions", []).append(
        {"before": attended(before), "after": attended(after), "cells": moves.cells}
    )
    lab.expect(
        attended(after) == needed(after),
        f"attention visits {attended(after)} cells, but only {needed(after)} are needed",
    )
    if lab.native.about.capabilities & Capability.COUNTERS:
        lab.expect(counted is not None, "the library reports counters, but none for this memory")
    if counted is not None:
        counts = lab.counters(player) - counted
        lab.expect(
            counts.cells_moved == moves.cells,
            f"{moves.cells} cells moved, but the counter reports {counts.cells_moved}",
        )
    lab.expect(
        not moves.vanished and not moves.appeared,
        f"the defragmentation lost {moves.vanished} cells and added {moves.appeared}",
    )


def _defrag(lab: Lab, player: Player) -> None:
    """Defragment. A library with this capability must not refuse, and must log nothing."""
    lab.logs()
    try:
        player.defrag()
    except Unsupported as error:
        if not lab.native.about.capabilities & Capability.DEFRAG:
            raise
        msg = f"the library reports defragmentation as supported, but refused it: {error}"
        raise ScenarioFailed(msg, failure="claim") from error
    lines = lab.logs()
    lab.expect(not lines, f"a defragmentation logged: {lines[0] if lines else ''}")
