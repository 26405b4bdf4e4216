"""Let two sequences share cells: forks, and copies of a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import PartialRemovalRefused
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


def share(source: Sequence, other: Sequence, length: int | None) -> None:
    """Let an empty sequence have the first ``length`` tokens of another (None: all)."""
    context, native, ledger = source.context, source.context.native, source.ledger
    cut = None if length is None or length >= len(ledger) else ledger.positions[length]
    with context.turn:
        if context.info.n_swa:
            windows.check(context, source.id, ledger.positions[:length], "a fork")
        if cut is None or not context.streams:
            native.seq_cp(context.handle, source.id, other.id, -1, -1 if cut is None else cut)
        else:
            # Between streams llama.cpp asserts that whole sequences are copied.
            native.seq_cp(context.handle, source.id, other.id, -1, -1)
            native.update(context.handle)
            if not native.seq_rm(context.handle, other.id, cut, -1):
                raise refused(source.id, cut, None)
            context.keeper.freed()
        other.ledger.copy_from(ledger, None, cut, share=not context.streams)
        if cut is None:
            other.ledger.logits_at = ledger.logits_at
            other.ledger.logits_epoch = ledger.logits_epoch


def refused(number: int, p0: int | None, p1: int | None) -> PartialRemovalRefused:
    """Make the error for a memory that keeps a sequence whole or not at all."""
    msg = (
        f"this memory cannot remove a part of sequence {number} (positions {p0}..{p1}); nothing "
        "was changed: remove the whole sequence and decode again what shall stay"
    )
    return PartialRemovalRefused(msg)
