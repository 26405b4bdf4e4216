"""Close a gap in a sequence without moving the cells under a sequence that shares them.

A cell has one position, whoever uses it: to shift a fork moves its sibling along. So cells that
would move are given up for cells of the sequence's own first, or nothing is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.cache.room import no_room
from pyllamakv.errors import SharedCells, StateError

if TYPE_CHECKING:
    from pyllamakv.runtime.sequence import Sequence


def check(lane: Sequence, end: int, *, unshare: bool) -> None:
    """Raise SharedCells, or KVCacheFull, unless the positions from ``end`` on can move."""
    others = _sharers(lane, end)
    if not others:
        return
    if not unshare:
        names = ", ".join(map(str, others))
        msg = (
            f"positions from {end} on of sequence {lane.id} lie in cells that sequence {names} has "
            "as well, where they would move too; nothing was changed: give unshare=True for cells "
            "of its own"
        )
        raise SharedCells(msg, others)
    ledgers = lane.context.ledgers
    theirs = {mark for each in ledgers if each is not lane.ledger for mark in each.marks}
    needed = sum(mark in theirs for mark in lane.ledger.marks)
    with lane.context.turn:
        seen = lane.context.kv.peek()
    if seen is not None and seen.stats.free < needed:
        raise no_room(lane, needed, f"{needed} shared cells, {seen.stats.free} free ones")


def close_gap(lane: Sequence, begin: int, end: int) -> None:
    """Remove begin <= p < end, and let the positions behind close up, in cells of their own."""
    if _sharers(lane, end):
        try:
            lane.restore(lane.save())
        except StateError as error:
            raise no_room(lane, len(lane), error) from error
    lane.remove(begin, end)
    lane.shift(end, None, begin - end)


def _sharers(lane: Sequence, end: int) -> tuple[int, ...]:
    return lane.ledger.shared_with(enumerate(lane.context.ledgers), end, None)
