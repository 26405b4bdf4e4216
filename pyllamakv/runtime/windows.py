"""Know whether a sliding-window cache still has what the next token of a sequence will see.

Cells that no window shows any more are given to other tokens. Who then goes back, to an earlier end
of the sequence, looks through a window that has lost a part; llama.cpp does not tell.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from pyllamakv.errors import PartialRemovalRefused

if TYPE_CHECKING:
    from collections.abc import Sequence as Positions

    from pyllamakv.runtime.context import Context


def lacking(context: Context, number: int, positions: Positions[int]) -> int | None:
    """Return the first position that is missing in a sequence's window; the turn is held.

    ``positions`` are what the sequence has, or would have, in order. None: nothing is missing.
    """
    window = context.info.n_swa
    if not window or not positions:
        return None
    snapshot = context.kv.peek()
    if snapshot is None:
        return None
    there: set[int] = set()
    for cells in snapshot.streams:
        if cells.swa:
            there.update(cells.pos[cells.has(number)].tolist())
    needed = positions[bisect_left(positions, positions[-1] + 2 - window) :]
    return next((pos for pos in needed if pos not in there), None)


def check(context: Context, number: int, positions: Positions[int], what: str) -> None:
    """Raise PartialRemovalRefused when a sequence of these positions would lack a part."""
    lost = lacking(context, number, positions) if context.guard else None
    if lost is not None:
        msg = (
            f"{what} would leave sequence {number} at position {positions[-1] + 1}, from where it "
            f"sees {context.info.n_swa} positions back, and the sliding-window cache has given "
            f"position {lost} away; nothing was changed: decode the sequence again, or make the "
            "context with swa_full=True and cells to spare"
        )
        raise PartialRemovalRefused(msg)
