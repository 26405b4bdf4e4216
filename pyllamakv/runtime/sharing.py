"""Let two sequences share cells: forks, copies of a prefix, and ranges of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Memory
from pyllamakv.errors import PartialRemovalRefused, Unsupported, UsageError
from pyllamakv.runtime import windows

if TYPE_CHECKING:
    from pyllamakv.runtime.sequence import Sequence


def check(source: Sequence, length: int | None) -> None:
    """Raise PartialRemovalRefused unless the first ``length`` tokens can be had alone."""
    context, positions = source.context, source.ledger.positions
    if length is None or length >= len(positions):
        return
    if context.info.can_remove_partly is False:
        raise refused(source.id, positions[length], None)
    if context.info.n_swa:
        with context.turn:
            windows.check(context, source.id, positions[:length], "a fork")


def prefix(source: Sequence, other: Sequence, length: int | None) -> None:
    """Let an empty sequence have the first ``length`` tokens of another (None: all)."""
    context, native, ledger = source.context, source.context.native, source.ledger
    cut = None if length is None or length >= len(ledger) else ledger.positions[length]
    with context.turn:
        if context.info.n_swa:
            windows.check(context, source.id, ledger.positions[:length], "a fork")
        if cut is None or context.partitions == 1:
            native.seq_cp(context.handle, source.id, other.id, -1, -1 if cut is None else cut)
        else:
            # Between streams, or where there may be some, llama.cpp asserts that whole sequences
            # are copied.
            native.seq_cp(context.handle, source.id, other.id, -1, -1)
            native.update(context.handle)
            if not native.seq_rm(context.handle, other.id, cut, -1):
                raise refused(source.id, cut, None)
            context.keeper.freed()
        other.ledger.copy_from(ledger, None, cut, share=context.shares)
        if cut is None:
            other.ledger.logits_at = ledger.logits_at
            other.ledger.logits_epoch = ledger.logits_epoch


def span(sequence: Sequence, other: Sequence, p0: int | None, p1: int | None) -> int:
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


def refused(number: int, p0: int | None, p1: int | None) -> PartialRemovalRefused:
    """Make the error for a memory that keeps a sequence whole or not at all."""
    msg = (
        f"this memory cannot remove a part of sequence {number} (positions {p0}..{p1}); nothing "
        "was changed: remove the whole sequence and decode again what shall stay"
    )
    return PartialRemovalRefused(msg)
