"""Implement `Cache` over one context, with all memory reserved at the start.

A call that raises leaves the cache unchanged, as far as its memory can go back. Closing a gap in a
sequence moves cells, and a cell has one position for all sequences that share it: shared cells are
replaced by copies first, or the call is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pyllamakv.binding import arguments
from pyllamakv.cache import defrag_retry
from pyllamakv.cache.checkpoints import (
    CheckpointSchedule,
    SequenceRewinder,
    why_no_gap_removal,
    why_no_rewind,
)
from pyllamakv.cache.defrag_retry import restore_full_error
from pyllamakv.cache.inspection import check_ledgers, describe
from pyllamakv.cache.interface import check_range
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    KVCacheFull,
    KvError,
    SharedCells,
    StateError,
    Unsupported,
    UsageError,
)
from pyllamakv.runtime.batch import Batch, as_int32
from pyllamakv.runtime.breakdown import MemoryBreakdown, memory_breakdown
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.model import Model
from pyllamakv.runtime.reservation import reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyllamakv.cache.checkpoints import Checkpoint
    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Hold the context during an operation of several calls."""

    @wraps(method)
    def run(self: Any, /, *given: P.args, **options: P.kwargs) -> R:
        with self.context.lock:
            return method(self, *given, **options)

    return run


class ContextCache(ClosedOnExit):
    """Implement `Cache` over a context, and use all of its ``sequences``.

    ``checkpoints`` schedules saved states for memory that cannot remove tokens. ``fill_cache``
    fills the cache once, to prove that every allocation succeeds. Raises NotEnoughMemory if the
    worst case does not fit, and UsageError if the context is in use.
    """

    def __init__(
        self,
        context: Context,
        *,
        checkpoints: CheckpointSchedule | None = None,
        fill_cache: bool = False,
    ) -> None:
        self.context = arguments.instance("context", context, Context, "a Context")
        fill_cache = arguments.flag("fill_cache", fill_cache)
        if checkpoints is not None:
            arguments.instance(
                "checkpoints", checkpoints, CheckpointSchedule, "a CheckpointSchedule or None"
            )
        self.sequences: tuple[runtime.Sequence, ...] = ()
        self._owned: Context | None = None
        self._stats = ContextCacheStats()
        if any(map(len, context.ledgers)):
            msg = "this context has tokens already; a cache requires an empty one"
            raise UsageError(msg)
        info = context.info
        #: The number of sequences.
        self.max_sequences = info.n_seq_max
        #: The maximum number of tokens per forward pass.
        self.max_batch = info.n_batch
        #: The maximum number of tokens per sequence.
        self.capacity = info.n_ctx // context.partitions
        try:
            for number in range(info.n_seq_max):
                self.sequences += (context.sequence(number),)
            reserve(context, fill_cache=fill_cache)
            self.rewinder = SequenceRewinder(self.sequences, checkpoints)
        except BaseException:
            self.close()
            raise

    @classmethod
    def init(
        cls,
        model: Model,
        *,
        dtype: str | tuple[str, str] = "f16",
        max_sequences: int = 1,
        capacity: int = 512,
        max_batch: int = 512,
        checkpoints: CheckpointSchedule | None = None,
        fill_cache: bool = False,
        **options: Any,
    ) -> ContextCache:
        """Create a context for this number of sequences and tokens, and a cache that owns it.

        ``dtype`` is the type of K and V, or a pair. ``options`` are those of `Model.context`.
        Raises NotEnoughMemory and the errors of `Model.context`.
        """
        arguments.instance("model", model, Model, "a Model")
        max_sequences = arguments.integer("max_sequences", max_sequences, 1, arguments.INT32)
        capacity = arguments.integer("capacity", capacity, 1, arguments.INT32)
        max_batch = arguments.integer("max_batch", max_batch, 1, arguments.INT32)
        fill_cache = arguments.flag("fill_cache", fill_cache)
        if checkpoints is not None:
            arguments.instance(
                "checkpoints", checkpoints, CheckpointSchedule, "a CheckpointSchedule or None"
            )
        if max_batch > capacity:
            msg = (
                f"a batch of {max_batch} tokens does not fit into a sequence of {capacity}: give "
                "capacity of at least max_batch"
            )
            raise UsageError(msg)
        pair = (dtype, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise arguments.wrong_type("dtype", dtype, "the name of a type, or a pair of names")
        type_k, type_v = pair
        options |= {"type_k": type_k, "type_v": type_v, "n_seq_max": max_sequences}
        cells = capacity * max_sequences
        context = model.context(cells, max_batch, **options)
        try:
            cache = cls(context, checkpoints=checkpoints, fill_cache=fill_cache)
        except BaseException:
            context.close()
            raise
        cache._owned, cache.capacity = context, capacity
        return cache

    def length(self, sequence: int) -> int:
        """Return the position of the sequence's next token."""
        return self.runtime_sequence(sequence).next_pos

    def runtime_sequence(self, number: int) -> runtime.Sequence:
        """Return the `Sequence` of a number. Raises UsageError if it is out of range."""
        number = arguments.integer("sequence", number)
        if not 0 <= number < len(self.sequences):
            msg = (
                f"sequence {arguments.shown(number)} is out of range: there are "
                f"0..{len(self.sequences) - 1}"
            )
            raise UsageError(msg)
        return self.sequences[number]

    @_locked
    def start_forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Decode a batch: see `Cache.start_forward`."""
        tokens, positions, sequences = checked_pass(tokens, positions, sequences)
        counts, run = split_batch(
            self.context, self.sequences, tokens, positions, sequences, logits
        )
        for number, more in counts.items():
            held = len(self.sequences[number].ledger.tokens)
            if held + more > self.capacity:
                self._stats.full_errors += 1
                raise defrag_retry.capacity_error(number, held, more, self.capacity)
        try:
            self._stats.defrags += defrag_retry.decode_with_defrag(self.context, run, counts)
        except KvError as error:
            self.rewinder.failed()
            self._stats.full_errors += isinstance(error, KVCacheFull)
            self._stats.defrags += isinstance(error, KVCacheFull) and error.defragged
            if isinstance(error, Unsupported):
                raise Unsupported(str(error), error.capability, reason=str(error)) from error
            raise
        self._stats.forwards += 1
        self._stats.decoded_tokens += len(tokens)
        if self.rewinder.saves:
            for number, more in counts.items():
                self.rewinder.record_decoded(self.sequences[number], more)

    @_locked
    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Share a prefix: see `Cache.copy_prefix`."""
        length = arguments.integer("length", length, 0)
        kept = self.check_copy(source, target, length)
        seq, other = self.sequences[source], self.sequences[target]
        length = min(length, seq.next_pos)
        if source == target:
            return length
        if kept is not None:
            self.rewinder.restore(other, kept)
        else:
            self.rewinder.empty(other)
            seq.copy_to(other, seq.ledger.span(None, length)[1])
        self.rewinder.rings[target].copy_from(self.rewinder.rings[source], length)
        self._stats.copies += 1
        self._stats.restores += kept is not None
        return length

    def check_copy(self, source: int, target: int, length: int) -> Checkpoint | None:
        """Raise the errors of `copy_prefix`; return the checkpoint that it would use, if any."""
        seq, _ = self.runtime_sequence(source), self.runtime_sequence(target)
        length = arguments.integer("length", length, 0)
        length = min(length, seq.next_pos)
        reason = None if source == target else why_no_rewind(seq, length)
        if reason is None:
            return None
        return self._kept(seq, length, f"copy {length} positions of sequence {source}", reason)

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return whether decoding can continue: see `Cache.can_resume`."""
        position = arguments.integer("position", position, 0)
        return self.rewinder.can_resume(self.runtime_sequence(sequence), position)

    def prepare_restore(self, sequence: int, target: int) -> int:
        """Return the last resumable position: see `Cache.prepare_restore`."""
        target = arguments.integer("target", target, 0)
        self.can_resume(sequence, target)
        return self.rewinder.latest_resumable(self.runtime_sequence(sequence), target)

    @_locked
    def remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> None:
        """Remove positions and shift later ones down: see `Cache.remove`."""
        begin, end = check_range(begin, end)
        kept = self.check_remove(sequence, begin, end, unshare=unshare)
        if begin == end:
            return
        seq = self.sequences[sequence]
        if kept is not None:
            self.rewinder.restore(seq, kept)
            self._stats.restores += 1
        elif end is not None and end < seq.next_pos:
            _close_gap(seq, begin, end)
        elif begin == 0:
            self.rewinder.empty(seq)
        elif begin < seq.next_pos:
            seq.remove(begin, None)
        self.rewinder.rings[sequence].prune(begin - 1)
        self._stats.removals += 1

    def check_remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> Checkpoint | None:
        """Raise the errors of `remove`; return the checkpoint that it would use, if any."""
        seq = self.runtime_sequence(sequence)
        begin, end = check_range(begin, end)
        unshare = arguments.flag("unshare", unshare)
        if begin == end:
            return None
        what = f"remove positions {begin}..{'' if end is None else end} of sequence {sequence}"
        if end is not None and end < seq.next_pos:
            reason = why_no_gap_removal(seq, begin, end)
            if reason is not None:
                raise _refused(what, reason)
            _check_unshared(seq, end, unshare=unshare)
            return None
        if begin > seq.next_pos:
            return self.rewinder.checkpoint_at(
                seq, begin
            )  # after a failure that emptied the sequence
        reason = why_no_rewind(seq, begin)
        return self._kept(seq, begin, what, reason) if reason is not None else None

    def memory_breakdown(self) -> MemoryBreakdown:
        """Return the bytes of the cache, its context and its model."""
        return memory_breakdown(self.context)

    def stats(self) -> ContextCacheStats:
        """Return totals and checkpoints."""
        rings = self.rewinder.rings
        held = sum(ring.bytes for ring in rings)
        return replace(self._stats, checkpoints=sum(map(len, rings)), checkpoint_bytes=held)

    def dump(self) -> str:
        """Return the content of sequences and cells as text."""
        return describe(self.context)

    def check(self) -> None:
        """Raise AssertionError unless cells and ledgers agree."""
        check_ledgers(self.context)

    def close(self) -> None:
        """Free the sequences, and the context if `init` created it."""
        for seq in self.sequences:
            seq.close()
        if self._owned is not None:
            self._owned.close()

    def __repr__(self) -> str:
        return (
            f"<ContextCache, {self.max_sequences} sequences of {self.capacity} tokens, batches of "
            f"{self.max_batch}>"
        )

    def _kept(self, seq: runtime.Sequence, length: int, what: str, reason: str) -> Checkpoint:
        found = self.rewinder.checkpoint_at(seq, length)
        if found is None:
            raise _refused(what, reason)
        return found


def _refused(what: str, reason: str) -> Unsupported:
    return Unsupported(f"cannot {what}: {reason}; nothing was changed", reason=reason)


def split_batch(
    context: Context,
    all_sequences: tuple[runtime.Sequence, ...],
    tokens: Sequence[int],
    positions: Sequence[int],
    sequences: Sequence[int],
    logits: Sequence[bool] | None,
) -> tuple[dict[int, int], Callable[[], None]]:
    """Return the number of tokens per sequence, and the work to decode them.

    Raises UsageError for an unknown sequence, or for a token at a wrong position; the decode checks
    the rest.
    """
    counts = lengths(sequences)
    for number in counts:
        if not 0 <= number < len(all_sequences):
            msg = f"sequence {number} is out of range: there are 0..{len(all_sequences) - 1}"
            raise UsageError(msg)
    n = len(tokens)
    if logits is None and 0 < n == len(counts) == len(positions) == len(sequences):
        # The common case of generation: one token per sequence.
        chosen = [all_sequences[number] for number in sequences]
        for seq, pos in zip(chosen, positions, strict=True):
            if pos != seq.ledger.next:
                msg = (
                    f"sequence {seq.id} continues at position {seq.ledger.next}, not {pos}: "
                    "positions must be contiguous"
                )
                raise UsageError(msg)
        if n == 1:
            return counts, partial(chosen[0].step, tokens[0])
        return counts, partial(context.step_all, chosen, tokens)
    wanted = logits
    if wanted is None:
        last = {number: place for place, number in enumerate(sequences)}
        wanted = [last[number] == place for place, number in enumerate(sequences)]
    return counts, partial(context.decode, Batch.of(tokens, positions, sequences, wanted))


def checked_pass(*lists: Any) -> tuple[list[int], ...]:
    """Return tokens, positions and sequences as lists of whole numbers of one length."""
    names = ("tokens", "positions", "sequences")
    found = tuple(as_int32(one, name).tolist() for one, name in zip(lists, names, strict=True))
    if len(set(map(len, found))) > 1:
        counted = ", ".join(f"{len(one)} {name}" for one, name in zip(found, names, strict=True))
        msg = f"a batch has as many tokens as positions and sequences, not {counted}"
        raise UsageError(msg)
    return found


def lengths(sequences: Sequence[int]) -> dict[int, int]:
    """Count the tokens of each sequence in a batch."""
    found: dict[int, int] = {}
    for each in sequences:
        found[each] = found.get(each, 0) + 1
    return found


def _check_unshared(seq: runtime.Sequence, end: int, *, unshare: bool) -> None:
    """Raise SharedCells, or KVCacheFull, unless the positions from ``end`` on can move."""
    others = _sharers(seq, end)
    if not others:
        return
    if not unshare:
        names = ", ".join(map(str, others))
        msg = (
            f"positions from {end} on of sequence {seq.id} are in cells that sequence {names} "
            "shares, and would move there too; nothing was changed: pass unshare=True to "
            "copy them first"
        )
        raise SharedCells(msg, others)
    ledgers = seq.context.ledgers
    theirs = {mark for each in ledgers if each is not seq.ledger for mark in each.marks}
    needed = sum(mark in theirs for mark in seq.ledger.marks)
    with seq.context.lock:
        seen = seq.context.kv.try_snapshot()
    if seen is not None and seen.stats.free < needed:
        raise restore_full_error(seq, needed, f"{needed} shared cells, {seen.stats.free} free ones")


def _close_gap(seq: runtime.Sequence, begin: int, end: int) -> None:
    """Remove begin <= p < end and shift later positions down, in cells of their own."""
    if _sharers(seq, end):
        try:
            seq.restore(seq.save(portable=False))
        except StateError as error:
            raise restore_full_error(seq, len(seq), error) from error
    seq.remove(begin, end)
    seq.shift(end, None, begin - end)


def _sharers(seq: runtime.Sequence, end: int) -> tuple[int, ...]:
    return seq.ledger.shared_with(enumerate(seq.context.ledgers), end, None)


@dataclass(slots=True)
class ContextCacheStats:
    """The totals of a `ContextCache`, and its present checkpoints.

    Successful ``forwards`` decoded ``decoded_tokens``. ``full_errors`` counts `KVCacheFull`,
    ``defrags`` defragmentations for a full cache, ``copies`` and ``removals`` calls, and
    ``restores`` returns to a checkpoint. There are ``checkpoints`` of ``checkpoint_bytes``.
    """

    forwards: int = 0
    decoded_tokens: int = 0
    full_errors: int = 0
    defrags: int = 0
    copies: int = 0
    removals: int = 0
    restores: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the numbers as JSON values."""
        return asdict(self)
