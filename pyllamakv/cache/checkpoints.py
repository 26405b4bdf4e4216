"""Resume sequences at earlier positions, from checkpoints if their memory cannot remove tokens.

A checkpoint at position p includes the token at p: decoding continues at p + 1. `Ring` stores the
checkpoints of one sequence as bytes; `SequenceRewinder` saves and restores the sequences of a
context.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability, MemoryType
from pyllamakv.cache.defrag_retry import restore_full_error
from pyllamakv.errors import NativeError, PartialRemovalRefused, StateError, Unsupported
from pyllamakv.runtime import state, swa
from pyllamakv.runtime.sequence import shift_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Many

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

#: Defaults: checkpoints per sequence, positions between two of them, and the first position.
SIZE, INTERVAL, FIRST = 24, 1664, 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved sequence after position ``pos``; without bytes, it is incomplete."""

    pos: int
    saved: bytes

    @property
    def complete(self) -> bool:
        """Return whether it can be restored."""
        return bool(self.saved)


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """Define the number of checkpoints, and the tokens between them.

    ``size`` is the maximum number (0: none), and ``interval`` the number of tokens between two; the
    first is due after ``first`` tokens. ``budget`` is the maximum of their bytes. The limits are
    those of each sequence in a `ContextCache`, where a new checkpoint replaces the oldest one, and
    of all prompts together in a `PrefixCache` or `SlotCache`, which drop the least useful one.
    Raises UsageError for a negative number.
    """

    size: int = SIZE
    interval: int = INTERVAL
    first: int = FIRST
    budget: int = 1 << 30

    def __post_init__(self) -> None:
        for name, low in (("size", 0), ("interval", 1), ("first", 0), ("budget", 0)):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name), low))


class Ring:
    """The checkpoints of one sequence, in the order of their positions."""

    def __init__(self, schedule: CheckpointSchedule | None = None) -> None:
        self.schedule = schedule or CheckpointSchedule()
        self._kept: list[Checkpoint] = []
        self._bytes = 0
        #: The position at which the next checkpoint is due.
        self.due = self.schedule.first

    @property
    def bytes(self) -> int:
        """Return the bytes of all checkpoints."""
        return self._bytes

    @property
    def positions(self) -> list[int]:
        """Return the positions of the checkpoints."""
        return [each.pos for each in self._kept]

    @property
    def newest(self) -> int:
        """Return the position of the last checkpoint, or -1."""
        return self._kept[-1].pos if self._kept else -1

    def put(self, checkpoint: Checkpoint) -> None:
        """Add the checkpoint of a position, replacing those at the same or a later position."""
        self.prune(checkpoint.pos - 1)
        self._kept.append(checkpoint)
        self._bytes += len(checkpoint.saved)
        while self._kept and (
            len(self._kept) > self.schedule.size or self._bytes > self.schedule.budget
        ):
            self._bytes -= len(self._kept.pop(0).saved)
        # Also if it exceeds the limit, because the next one will not be smaller.
        self.due = checkpoint.pos + self.schedule.interval

    def best(self, target: int) -> Checkpoint | None:
        """Return the last complete checkpoint before ``target``, or None."""
        fitting = (each for each in reversed(self._kept) if each.pos < target and each.complete)
        return next(fitting, None)

    def at(self, pos: int) -> Checkpoint | None:
        """Return the complete checkpoint of exactly this position, or None."""
        found = self.best(pos + 1)
        return found if found is not None and found.pos == pos else None

    def prune(self, last: int) -> None:
        """Remove every checkpoint after position ``last``, whose tokens were removed."""
        while self._kept and self._kept[-1].pos > last:
            self._bytes -= len(self._kept.pop().saved)
        newest = self._kept[-1].pos + self.schedule.interval if self._kept else 0
        self.due = max(self.schedule.first, newest)

    def copy_from(self, other: Ring, length: int) -> None:
        """Copy another sequence's checkpoints of its first ``length`` positions."""
        self.prune(-1)
        for each in other._kept:
            if each.pos < length:
                self.put(each)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._kept)


LOGGER = logging.getLogger("pyllamakv.cache")


def leaves_states(sequence: Sequence, other: Sequence | None = None) -> bool:
    """Return whether a recurrent sequence cannot start in place of a removed one.

    The context must be empty: it is tried out, and cleared. docs/api.md lists the releases.
    ``other`` has a state meanwhile: the library clears the memory with its last one.
    """
    context = sequence.context
    try:
        if other is not None:
            context.decode(other.feed([0, 0]))
        for _ in range(2):
            # Two tokens, because some releases report a sequence of one token as empty.
            context.decode(sequence.feed([0, 0]))
            sequence.remove()
    except Unsupported:
        return True
    finally:
        context.clear()
    return False


def starts_after_clear(context: Context) -> bool:
    """Return whether a recurrent sequence cannot start in place of a removed one before a clear.

    False if the context is not empty, because it cannot be tried out.
    """
    unused = len(context.vacant) == context.info.n_seq_max
    if context.info.memory is not MemoryType.RECURRENT or not unused:
        return False
    with context.sequence() as sequence:
        if not context.vacant:
            return leaves_states(sequence)
        with context.sequence() as other:
            return leaves_states(sequence, other)


def why_no_rewind(sequence: Sequence, position: int) -> str | None:
    """Return why the memory cannot keep the positions below ``position`` alone; None: it can."""
    ledger, info = sequence.ledger, sequence.context.info
    if position > ledger.next:
        return f"sequence {sequence.id} ends at position {ledger.next}"
    if position in (0, ledger.next):
        return None
    if info.memory.keeps_states or info.can_remove_partly is False:
        return "this memory stores one state per sequence, and no earlier ones"
    return _window(sequence, ledger.without(position, None))


def why_no_gap_removal(sequence: Sequence, begin: int, end: int) -> str | None:
    """Return why positions from ``end`` cannot move to ``begin``, or None."""
    context, info = sequence.context, sequence.context.info
    if info.memory.keeps_states or info.can_remove_partly is False:
        return "this memory stores one state per sequence, which cannot be removed in part"
    if not info.can_shift:
        return shift_refusal(context.model, context.params, info)
    return _window(sequence, sequence.ledger.without(begin, end))


def _window(sequence: Sequence, positions: list[int]) -> str | None:
    context = sequence.context
    if not context.info.n_swa or not positions:
        return None
    with context.lock:
        if context.kv.try_snapshot() is None:
            return "this build cannot show the content of its sliding-window cache"
        try:
            swa.check(context, sequence.id, positions, "removing them")
        except PartialRemovalRefused as refusal:
            return str(refusal)
    return None


class SequenceRewinder:
    """Rewind the sequences of a context, by their memory or by checkpoints.

    The context must be empty: it is tried out, where its memory keeps states.
    """

    def __init__(self, sequences: Many[Sequence], schedule: CheckpointSchedule | None) -> None:
        self._sequences = sequences
        self._context = sequences[0].context
        info = self._context.info
        self.rings = tuple(Ring(schedule) for _ in sequences)
        wanted = self.rings[0].schedule.size > 0 and Capability.STATES in (
            self._context.native.about.capabilities
        )
        #: Whether checkpoints are saved, because the memory cannot always return to a position.
        forgets = info.n_swa > 0 and not self._context.params.swa_full
        self.saves = wanted and (info.memory.keeps_states or forgets)
        #: Whether a new sequence would start with the state of a removed one.
        other = sequences[1] if len(sequences) > 1 else None
        self._leaves = info.memory.keeps_states and leaves_states(sequences[0], other)
        self._left = False

    def can_resume(self, sequence: Sequence, position: int) -> bool:
        """Return whether decoding can continue at a position."""
        if position == 0 and self._leaves:
            others = any(len(each) for each in self._sequences if each is not sequence)
            return not others or (not len(sequence) and not self._left)
        if why_no_rewind(sequence, position) is None:
            return True
        return self.rings[sequence.id].at(position - 1) is not None

    def latest_resumable(self, sequence: Sequence, target: int) -> int:
        """Return the last position up to ``target`` that `can_resume`, or 0."""
        if self.can_resume(sequence, target):
            return target
        best = self.rings[sequence.id].best(target)
        end = sequence.next_pos
        return max(best.pos + 1 if best else 0, end if end < target else 0)

    def checkpoint_at(self, sequence: Sequence, position: int) -> Checkpoint | None:
        """Return the checkpoint of exactly the positions below ``position``, or None."""
        return self.rings[sequence.id].at(position - 1)

    def restore(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint. Raises KVCacheFull with nothing changed.

        Raises StateError for a damaged one.
        """
        state.unpack(checkpoint.saved)
        try:
            sequence.restore(checkpoint.saved)
        except StateError as error:
            raise restore_full_error(sequence, checkpoint.pos + 1, error) from error
        self.rings[sequence.id].prune(checkpoint.pos)
        self._left |= self._leaves

    def empty(self, sequence: Sequence) -> None:
        """Remove a whole sequence, which always works."""
        self._left |= self._leaves and len(sequence) > 0
        sequence.remove()
        self.rings[sequence.id].prune(-1)
        self._forget()

    def failed(self) -> None:
        """Record that a decode failed: it may have emptied sequences."""
        self._left |= self._leaves and bool(self._context.emptied)
        self._forget()

    def record_decoded(self, sequence: Sequence, more: int) -> None:
        """Record ``more`` tokens of a sequence, and save a checkpoint if one is due."""
        ring, pos = self.rings[sequence.id], sequence.ledger.next - 1
        if ring.newest > pos - more:
            # These remain from a sequence that a failure emptied, and belong to other tokens.
            ring.prune(pos - more)
        if pos < ring.due:
            return
        try:
            ring.put(Checkpoint(pos, sequence.save(portable=False)))
        except (NativeError, Unsupported, MemoryError) as error:
            LOGGER.info("no checkpoints are kept: %s", error)
            self.saves = False
            for each in self.rings:
                each.prune(-1)
            return
        LOGGER.debug("checkpoint of sequence %d at %d, %d bytes", sequence.id, pos, ring.bytes)

    def _forget(self) -> None:
        if self._left and not any(map(len, self._sequences)):
            self._context.clear()
            self._left = False
