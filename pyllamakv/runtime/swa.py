"""Check whether a sliding-window cache still has the window of a sequence's next token.

llama.cpp reuses cells outside of every window. After a rewind to an earlier end, the window would
include such cells, and llama.cpp does not report it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.errors import PartialRemovalRefused, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as Positions

    from pyllamakv.binding.protocol import ContextHandle, ContextInfo, Native
    from pyllamakv.runtime.parts import Cells, ContextParts
    from pyllamakv.runtime.snapshot import CellMap, Snapshot


def first_missing_position(
    n_swa: int, kv: Cells, number: int, positions: Positions[int]
) -> int | None:
    """Return the first position that is missing in a sequence's window, or None.

    The caller holds the context's lock. ``positions`` are those of the sequence, present or
    intended, in order.
    """
    if not n_swa or not positions:
        return None
    snapshot = kv.try_snapshot()
    if snapshot is None:
        return None
    there: set[int] = set()
    for cells in snapshot.streams:
        if cells.swa:
            there.update(cells.pos[cells.has(number)].tolist())
    needed = positions[bisect_left(positions, positions[-1] + 2 - n_swa) :]
    return next((pos for pos in needed if pos not in there), None)


def reusable_cells(cells: CellMap, window: int) -> int:
    """Count the cells of a sliding-window cache that the next tokens may use.

    These are free cells, and cells outside of the window of their only sequence: llama.cpp does not
    reuse cells that several sequences share.
    """
    found = len(cells) - int(cells.used.sum())
    for number in np.flatnonzero(cells.counts).tolist():
        has = cells.has(number)
        behind = cells.pos + window <= cells.pos[has].max() + 1
        found += int((has & behind & (cells.sharers == 1)).sum())
    return found


def full_reason(snapshot: Snapshot, window: int, wanted: int | Mapping[int, int]) -> str:
    """Return how a sliding-window cache is too full for a batch; nothing where none is.

    ``wanted`` is its number of tokens, or that of each stream.
    """
    for cells in snapshot.streams:
        n = wanted if isinstance(wanted, int) else wanted.get(cells.stream, 0)
        if cells.swa and (left := reusable_cells(cells, window)) < n:
            return (
                f"{left} of the {len(cells)} cells for sliding windows are free or outside of "
                f"every "
                "window; shared cells are not dropped"
            )
    return ""


def check(context: ContextParts, number: int, positions: Positions[int], what: str) -> None:
    """Raise PartialRemovalRefused if a sequence of these positions would be incomplete."""
    if not context.guard:
        return
    lost = first_missing_position(context.info.n_swa, context.kv, number, positions)
    if lost is not None:
        msg = (
            f"{what} would leave sequence {number} at position {positions[-1] + 1}, from where it "
            f"sees {context.info.n_swa} positions back, and the sliding-window cache "
            f"has dropped position {lost}; nothing was changed: decode the sequence again, or "
            f"make the "
            "context with swa_full=True and more cells"
        )
        raise PartialRemovalRefused(msg)


def check_shared(
    native: Native, handle: ContextHandle, info: ContextInfo, ids: Iterable[int]
) -> None:
    """Raise UsageError unless sequences may share a token. The caller holds the context's lock.

    llama.cpp requires that their parts of a sliding-window cache start and end at the same
    positions, and otherwise refuses the batch. Without such a cache, there is no condition.
    """
    if not info.n_swa or info.n_caches < 2:
        return
    ends = {
        each: (native.seq_pos_min(handle, each), native.seq_pos_max(handle, each)) for each in ids
    }
    if len(set(ends.values())) > 1:
        parts = ", ".join(f"{a}..{b} of sequence {each}" for each, (a, b) in ends.items())
        msg = (
            "sequences that share a token must have the same first and last position in the "
            f"sliding-window cache, but have {parts} (-1: none); decode the token once for each"
        )
        raise UsageError(msg)
