"""What the scenarios of mapped memory have in common: a context in it, and what it may take."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import Backing, Capability
from pyllamakv.errors import Untestable

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: Pages that are read together with one that is touched, at most: the kernel's fault-around.
AROUND = 16


def mapped(lab: Lab, n_ctx: int, **options: Any) -> Player:
    """Make a player whose cache is in anonymous mapped memory; Unsupported on other builds."""
    lab.needs(Capability.MAPPING)
    return lab.player(n_ctx, kv_backing=int(Backing.ANONYMOUS), **options)


def must_shift(player: Player) -> None:
    """Raise Untestable where the memory shifts nothing, mapped or not."""
    if not player.info.can_shift:
        msg = "this memory cannot shift positions in this setting"
        raise Untestable(msg)


def committed(player: Player) -> int:
    """Return how many bytes of the cache are resident."""
    return player.native.mapping(player.context).info.bytes_committed


def reserved(player: Player) -> int:
    """Return how many bytes of address space the cache has."""
    return player.native.mapping(player.context).info.bytes_reserved


def max_committed(player: Player, cells: int) -> int:
    """Return the most that so many cells at the start of each stream may commit, in bytes.

    Rows of cells, as V has them without flash attention, are longer than a page in large caches:
    then each of them has pages of its own.
    """
    page = mmap.PAGESIZE
    total = 0
    for raw in (player.native.cells(player.context, i) for i in range(player.info.n_caches)):
        info = raw.info
        for bytes_all, columns in ((info.bytes_k, False), (info.bytes_v, info.v_transposed)):
            here = bytes_all * cells // info.n_cells
            pieces = info.n_layer
            if columns:
                # Two bytes per value; never more rows than the cache has pages.
                pieces = min(bytes_all // (2 * info.n_cells), bytes_all // page + 1)
            total += here + 2 * page * pieces
    return total


def expect_committed_below(lab: Lab, player: Player, cells: int, when: str) -> None:
    """Break the claim when the cache takes more than so many cells may."""
    taken, most = committed(player), max_committed(player, cells)
    lab.notes.setdefault("committed", {})[when] = taken
    lab.expect(taken <= most, f"{when}: {taken} bytes are resident, {most} would do")
