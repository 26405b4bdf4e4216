"""Let a sequence share cells of another one, a range of positions at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Memory
from pyllamakv.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from pyllamakv.runtime.sequence import Sequence


def share(sequence: Sequence, other: Sequence, p0: int | None, p1: int | None) -> int:
    """Share a range of another sequence's cells; `Sequence.share` describes it."""
    context = sequence.context
    with context.turn:
        sequence.check(context)
        other.check(context)
        if context.streams or context.info.memory is not Memory.ATTENTION:
            why = "each sequence has cells of its own" if context.streams else "it keeps states"
            msg = f"a part of a sequence cannot be shared in this memory: {why}; fork all of it"
            raise Unsupported(msg, "share")
        start, end = other.ledger.span(p0, p1)
        if start == end:
            return 0
        first, last = other.ledger.positions[start], other.ledger.positions[end - 1]
        taken = sequence.ledger.span(first, last + 1)
        if other is sequence or taken[0] != taken[1]:
            msg = (
                f"sequence {sequence.id} has tokens at positions {first}..{last} already; remove "
                "them first"
            )
            raise UsageError(msg)
        context.native.seq_cp(context.handle, other.id, sequence.id, first, last + 1)
        sequence.ledger.copy_from(other.ledger, first, last + 1, share=True)
        return end - start
