"""Helpers for mapped-memory scenarios: a mapped context, and the memory it may commit."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import Backing, Capability
from pyllamakv.errors import Untestable

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def mapped(lab: Lab, n_ctx: int, **options: Any) -> Player:
    """Return a player with a cache in anonymous mapped memory; raise Unsupported elsewhere."""
    lab.needs(Capability.MAPPING)
    return lab.player(n_ctx, kv_backing=int(Backing.ANONYMOUS), **options)


def must_shift(player: Player) -> None:
    """Raise Untestable if the memory cannot shift positions."""
    if not player.info.can_shift:
        msg = "this memory does not support position shifts in this setting"
        raise Untestable(msg)


def committed(player: Player) -> int:
    """Return the resident bytes of the cache."""
    return player.native.mapping(player.context).info.bytes_committed


def reserved(player: Player) -> int:
    """Return the bytes of address space of the cache."""
    return player.native.mapping(player.context).info.bytes_reserved


def max_committed(player: Player, cells: int) -> int:
    """Return the maximum bytes that the first ``cells`` of each stream may commit.

    Without flash attention, V is stored by columns. In a large cache, each column is longer than
    a page and has its own pages.
    """
    page = mmap.PAGESIZE
    total = 0
    for raw in (player.native.cells(player.context, i) for i in range(player.info.n_caches)):
        info = raw.info
        for bytes_all, columns in ((info.bytes_k, False), (info.bytes_v, info.v_transposed)):
            here = bytes_all * cells // info.n_cells
            pieces = info.n_layer
            if columns:
                # Two bytes per value; at most as many columns as the cache has pages.
                pieces = min(bytes_all // (2 * info.n_cells), bytes_all // page + 1)
            total += here + 2 * page * pieces
    return total


def expect_committed_below(lab: Lab, player: Player, cells: int, when: str) -> None:
    """Fail the claim if the cache commits more than ``cells`` may."""
    taken, most = committed(player), max_committed(player, cells)
    lab.notes.setdefault("committed", {})[when] = taken
    lab.expect(taken <= most, f"{when}: {taken} bytes are resident, expected at most {most}")
