"""Implement `Cache` over one context, with all memory reserved at the start.

A call that raises leaves the cache unchanged. Closing a gap in a sequence moves cells, and a cell
has one position for all sequences that share it: shared cells are replaced by copies first, or the
call is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.cache import room
from pyllamakv.cache.checkpoints import Past, Schedule, closing_gap, going_back
from pyllamakv.cache.inspection import check_ledgers, describe
from pyllamakv.cache.interface import check_range
from pyllamakv.cache.room import no_room
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
from pyllamakv.runtime.reservation import check_address_space, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from pyllamakv.cache.checkpoints import Checkpoint
    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context


class ContextCache:
    """Implement `Cache` over a context, whose sequences it takes all: ``lanes``.

    ``checkpoints`` says how often a sequence is saved where the memory cannot go back by itself;
    ``rehearse`` fills the whole cache once, to see that nothing is missing.
    Raises NotEnoughMemory when the worst case does not fit, UsageError when the context is in use.
    """

    def __init__(
        self, context: Context, *, checkpoints: Schedule | None = None, rehearse: bool = False
    ) -> None:
        self.context = arguments.instance("context", context, Context, "a Context")
        rehearse = arguments.flag("rehearse", rehearse)
        if checkpoints is not None:
            arguments.instance("checkpoints", checkpoints, Schedule, "a Schedule or None")
        self.lanes: tuple[runtime.Sequence, ...] = ()
        self._owned: Context | None = None
        self._stats = CacheStats()
        if any(map(len, context.ledgers)):
            msg = "this context has tokens already; a cache begins with an empty one"
            raise UsageError(msg)
        info = context.info
        self.max_sequences, self.max_batch = info.n_seq_max, info.n_batch
        self.capacity = info.n_ctx // context.partitions
        try:
            for number in range(info.n_seq_max):
                self.lanes += (context.sequence(number),)
            reserve(context, rehearse=rehearse)
            self.past = Past(self.lanes, checkpoints)
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
        checkpoints: Schedule | None = None,
        rehearse: bool = False,
        **options: Any,
    ) -> ContextCache:
        """Make a context for so many sequences of so many tokens each, and a cache that owns it.

        ``dtype`` is the type of K and V, or one for each; ``options`` are those of `Model.context`.
        Raises NotEnoughMemory and what `Model.context` raises.
        """
        arguments.instance("model", model, Model, "a Model")
        max_sequences = arguments.whole("max_sequences", max_sequences, 1, arguments.INT32)
        capacity = arguments.whole("capacity", capacity, 1, arguments.INT32)
        max_batch = arguments.whole("max_batch", max_batch, 1, arguments.INT32)
        rehearse = arguments.flag("rehearse", rehearse)
        if checkpoints is not None:
            arguments.instance("checkpoints", checkpoints, Schedule, "a Schedule or None")
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
        check_address_space(model, cells, max_batch, **options)
        context = model.context(cells, max_batch, **options)
        try:
            cache = cls(context, checkpoints=checkpoints, rehearse=rehearse)
        except BaseException:
            context.close()
            raise
        cache._owned, cache.capacity = context, capacity
        return cache

    def length(self, sequence: int) -> int:
        """Return the position that a sequence's next token gets."""
        return self.lane(sequence).next_pos

    def lane(self, number: int) -> runtime.Sequence:
        """Return the runtime's sequence of a number, or raise UsageError."""
        number = arguments.whole("sequence", number)
        if not 0 <= number < len(self.lanes):
            msg = (
                f"sequence {arguments.shown(number)} is out of range: there are "
                f"0..{len(self.lanes) - 1}"
            )
            raise UsageError(msg)
        return self.lanes[number]

    def start_forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Decode a batch; `Cache.start_forward` describes it."""
        tokens, positions, sequences = checked_pass(tokens, positions, sequences)
        counts, run = lay_out(self.context, self.lanes, tokens, positions, sequences, logits)
        for number, more in counts.items():
            held = len(self.lanes[number].ledger.tokens)
            if held + more > self.capacity:
                self._stats.full += 1
                raise room.beyond(number, held, more, self.capacity)
        try:
            self._stats.defrags += room.decode(self.context, run, counts)
        except KvError as error:
            self.past.failed()
            self._stats.full += isinstance(error, KVCacheFull)
            self._stats.defrags += isinstance(error, KVCacheFull) and error.defragged
            if isinstance(error, Unsupported):
                raise Unsupported(str(error), error.capability, reason=str(error)) from error
            raise
        self._stats.forwards += 1
        self._stats.decoded_tokens += len(tokens)
        if self.past.saves:
            for number, more in counts.items():
                self.past.passed(self.lanes[number], more)

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Share a prefix; `Cache.copy_prefix` describes it."""
        length = arguments.whole("length", length, 0)
        kept = self.check_copy(source, target, length)
        lane, other = self.lanes[source], self.lanes[target]
        length = min(length, lane.next_pos)
        if source == target:
            return length
        if kept is not None:
            self.past.restore(other, kept)
        else:
            self.past.empty(other)
            lane.copy_to(other, lane.ledger.span(None, length)[1])
        self.past.rings[target].copy_from(self.past.rings[source], length)
        self._stats.copies += 1
        self._stats.restores += kept is not None
        return length

    def check_copy(self, source: int, target: int, length: int) -> Checkpoint | None:
        """Raise what `copy_prefix` would; return the checkpoint that it would go by, if any."""
        lane, _ = self.lane(source), self.lane(target)
        length = arguments.whole("length", length, 0)
        length = min(length, lane.next_pos)
        reason = None if source == target else going_back(lane, length)
        if reason is None:
            return None
        return self._kept(lane, length, f"copy {length} positions of sequence {source}", reason)

    def can_resume(self, sequence: int, position: int) -> bool:
        """Tell where decoding can go on; `Cache.can_resume` describes it."""
        position = arguments.whole("position", position, 0)
        return self.past.can_resume(self.lane(sequence), position)

    def prepare_restore(self, sequence: int, target: int) -> int:
        """Return where to go on at the latest; `Cache.prepare_restore` describes it."""
        target = arguments.whole("target", target, 0)
        self.can_resume(sequence, target)
        return self.past.latest(self.lane(sequence), target)

    def remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> None:
        """Remove positions and close the gap; `Cache.remove` describes it."""
        begin, end = check_range(begin, end)
        kept = self.check_remove(sequence, begin, end, unshare=unshare)
        if begin == end:
            return
        lane = self.lanes[sequence]
        if kept is not None:
            self.past.restore(lane, kept)
            self._stats.restores += 1
        elif end is not None and end < lane.next_pos:
            _close_gap(lane, begin, end)
        elif begin == 0:
            self.past.empty(lane)
        elif begin < lane.next_pos:
            lane.remove(begin, None)
        self.past.rings[sequence].prune(begin - 1)
        self._stats.removals += 1

    def check_remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> Checkpoint | None:
        """Raise what `remove` would; return the checkpoint that it would go by, if any."""
        lane = self.lane(sequence)
        begin, end = check_range(begin, end)
        unshare = arguments.flag("unshare", unshare)
        if begin == end:
            return None
        what = f"remove positions {begin}..{'' if end is None else end} of sequence {sequence}"
        if end is not None and end < lane.next_pos:
            reason = closing_gap(lane, begin, end)
            if reason is not None:
                raise _refused(what, reason)
            _check_unshared(lane, end, unshare=unshare)
            return None
        if begin > lane.next_pos:
            return self.past.kept(lane, begin)  # after a failure that emptied the sequence
        reason = going_back(lane, begin)
        return self._kept(lane, begin, what, reason) if reason is not None else None

    def memory_breakdown(self) -> MemoryBreakdown:
        """Say where the bytes of the cache, its context and its model lie."""
        return memory_breakdown(self.context)

    def stats(self) -> CacheStats:
        """Return what was done so far, and what is kept."""
        rings = self.past.rings
        held = sum(ring.bytes for ring in rings)
        return replace(self._stats, checkpoints=sum(map(len, rings)), checkpoint_bytes=held)

    def dump(self) -> str:
        """Return what every sequence and every run of cells holds, as text."""
        return describe(self.context)

    def check(self) -> None:
        """Raise AssertionError unless cells and ledgers agree."""
        check_ledgers(self.context)

    def close(self) -> None:
        """Give the sequences back, and the context where `init` made it."""
        for lane in self.lanes:
            lane.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> ContextCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<ContextCache, {self.max_sequences} sequences of {self.capacity} tokens, batches of "
            f"{self.max_batch}>"
        )

    def _kept(self, lane: runtime.Sequence, length: int, what: str, reason: str) -> Checkpoint:
        found = self.past.kept(lane, length)
        if found is None:
            raise _refused(what, reason)
        return found


def _refused(what: str, reason: str) -> Unsupported:
    return Unsupported(f"cannot {what}: {reason}; nothing was changed", reason=reason)


def lay_out(
    context: Context,
    lanes: tuple[runtime.Sequence, ...],
    tokens: Sequence[int],
    positions: Sequence[int],
    sequences: Sequence[int],
    logits: Sequence[bool] | None,
) -> tuple[dict[int, int], Callable[[], None]]:
    """Return how many tokens each sequence gets, and what decodes them.

    Raises UsageError for a sequence that is not there, and for a single token in the wrong place;
    the rest is checked by the decode.
    """
    counts = lengths(sequences)
    for number in counts:
        if not 0 <= number < len(lanes):
            msg = f"sequence {number} is out of range: there are 0..{len(lanes) - 1}"
            raise UsageError(msg)
    n = len(tokens)
    if logits is None and 0 < n == len(counts) == len(positions) == len(sequences):
        # A token for each: what generation does, over and over.
        chosen = [lanes[number] for number in sequences]
        for lane, pos in zip(chosen, positions, strict=True):
            if pos != lane.ledger.next:
                msg = (
                    f"sequence {lane.id} goes on at position {lane.ledger.next}, not {pos}: "
                    "positions follow each other without a gap"
                )
                raise UsageError(msg)
        if n == 1:
            return counts, partial(context.step, chosen[0], tokens[0])
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


def _check_unshared(lane: runtime.Sequence, end: int, *, unshare: bool) -> None:
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


def _close_gap(lane: runtime.Sequence, begin: int, end: int) -> None:
    """Remove begin <= p < end, and let the positions behind close up, in cells of their own."""
    if _sharers(lane, end):
        try:
            lane.restore(lane.save())
        except StateError as error:
            raise no_room(lane, len(lane), error) from error
    lane.remove(begin, end)
    lane.shift(end, None, begin - end)


def _sharers(lane: runtime.Sequence, end: int) -> tuple[int, ...]:
    return lane.ledger.shared_with(enumerate(lane.context.ledgers), end, None)


@dataclass(slots=True)
class CacheStats:
    """Count what a `ContextCache` did, and the checkpoints that it has."""

    forwards: int = 0
    decoded_tokens: int = 0
    full: int = 0
    defrags: int = 0
    copies: int = 0
    removals: int = 0
    restores: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the numbers as plain JSON values."""
        return asdict(self)
