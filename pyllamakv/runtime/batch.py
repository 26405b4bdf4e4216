"""Describe and check work for a decode: next tokens (`Feed`) or positioned ones (`Batch`)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Pooling
from pyllamakv.errors import ArgumentTypeError, UsageError
from pyllamakv.runtime import swa

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextInfo
    from pyllamakv.runtime.parts import ContextParts, SequenceParts

LogitsChoice = Literal["last", "all", "none"]

_NUMBERS = "a flat list of whole numbers"
_FLAGS = "a flat list of True and False (or 1 and 0)"
_WORK = "feeds (sequence.feed(...)) or a Batch"


class BatchArrays(NamedTuple):
    """One batch as `Native.decode` takes it; ``counts`` None: one sequence per token."""

    token: NDArray[np.int32]
    pos: NDArray[np.int32]
    counts: NDArray[np.int32] | None
    seq: NDArray[np.int32]
    logits: NDArray[np.int8] | None


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """The next tokens (n,) int32 of a sequence, and which of them need logits.

    `Sequence.feed` creates it. Raises UsageError for tokens that are not integers of 32 bits.
    """

    sequence: SequenceParts
    tokens: NDArray[np.int32]
    logits: LogitsChoice = "last"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_tokens(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)


class Batch:
    """Collect tokens with positions and sequences. A batch may be decoded again after a failure."""

    def __init__(self) -> None:
        self._token: list[int] = []
        self._pos: list[int] = []
        self._seqs: list[tuple[int, ...]] = []
        self._logits: list[bool] = []
        self._arrays: BatchArrays | None = None

    def __repr__(self) -> str:
        n = len(self._token) if self._arrays is None else len(self._arrays.token)
        return f"<Batch of {n} tokens>"

    def add(
        self, token: int, pos: int, sequences: int | Iterable[int] = 0, logits: bool = False
    ) -> Batch:
        """Add a token at a position of one or several sequences (their ids); return the batch."""
        token = arguments.integer("token", token, -(2**31), arguments.INT32)
        pos = arguments.integer("pos", pos, -(2**31), arguments.INT32)
        many = sequences
        if isinstance(sequences, int | np.integer):
            many = (arguments.integer("sequences", sequences),)
        ids = tuple(as_int32(many, "sequences").tolist())
        logits = arguments.flag("logits", logits)
        if not ids:
            msg = "a token needs at least one sequence"
            raise UsageError(msg)
        if self._arrays is not None and not self._token:
            msg = "this batch was created from arrays; create another one to add single tokens"
            raise UsageError(msg)
        self._token.append(token)
        self._pos.append(pos)
        self._seqs.append(ids)
        self._logits.append(logits)
        self._arrays = None
        return self

    @classmethod
    def of(
        cls,
        tokens: Any,
        positions: Any,
        sequences: Any,
        logits: Any = None,
        *,
        counts: Any = None,
    ) -> Batch:
        """Create a batch from arrays. Arrays of int32 (logits: int8) are not copied.

        ``sequences`` is one id for all tokens, or (n,). With ``counts`` (n,), it is flat, and
        ``counts[i]`` ids belong to token i. If ``logits`` is None, the last token has logits.
        """
        batch = cls()
        token = as_int32(tokens, "tokens")
        seq = sequences
        if isinstance(sequences, int | np.integer):
            one = arguments.integer("sequences", sequences, -(2**31), arguments.INT32)
            seq = np.full(len(token), one, dtype=np.int32)
        arrays = BatchArrays(
            token,
            as_int32(positions, "positions"),
            None if counts is None else as_int32(counts, "counts"),
            as_int32(seq, "sequences"),
            None if logits is None else _as_flags(logits),
        )
        _check_lengths(arrays)
        batch._arrays = arrays
        return batch

    def arrays(self) -> BatchArrays:
        """Return the batch as arrays."""
        if self._arrays is None:
            single = all(len(ids) == 1 for ids in self._seqs)
            self._arrays = BatchArrays(
                as_int32(self._token, "tokens"),
                as_int32(self._pos, "positions"),
                None if single else as_int32([len(ids) for ids in self._seqs], "counts"),
                as_int32([i for ids in self._seqs for i in ids], "sequences"),
                np.array(self._logits, dtype=np.int8) if any(self._logits) else None,
            )
        return self._arrays

    def __len__(self) -> int:
        return len(self._arrays.token) if self._arrays is not None else len(self._token)


def as_int32(values: Any, what: str) -> NDArray[np.int32]:
    """Return a flat int32 array, without a copy if it is one already; raises UsageError.

    Accepts arrays of integers and iterables of whole numbers, but no bool, float, text, bytes,
    mapping or set, which has no order.
    """
    if isinstance(values, np.ndarray):
        if values.dtype == np.int32 and values.ndim == 1:
            return np.ascontiguousarray(values)
        wide = values
        if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
            kind = f"an array of {wide.dtype} of shape {wide.shape}"
            msg = f"{what} must be {_NUMBERS}, not {kind}"
            raise ArgumentTypeError(msg)
    else:
        wide = _numbers(values, what)
    if not wide.size:
        return np.empty(0, dtype=np.int32)
    if int(wide.min()) < -(2**31) or int(wide.max()) >= 2**31:
        msg = f"{what} must fit into 32 bits, found {int(wide.min())}..{int(wide.max())}"
        raise UsageError(msg)
    return wide.astype(np.int32)


def as_tokens(values: Any) -> NDArray[np.int32]:
    """Return the tokens of a feed as `as_int32` does, but refuse what has no fixed order or length.

    A feed may be decoded again, so an iterator that is consumed once is an error.
    """
    if not isinstance(values, Sequence | array | np.ndarray):
        expected = "a list or another ordered sequence of tokens" + _hint("tokens", type(values))
        raise arguments.wrong_type("tokens", values, expected)
    return as_int32(values, "tokens")


def _numbers(values: Any, what: str) -> NDArray[Any]:
    """Return the whole numbers of an iterable as an array."""
    if isinstance(values, range):
        # Check the ends first: a huge range would need an array that fills the memory.
        ends = (values[0], values[-1]) if values else ()
        if any(not -(2**31) <= end < 2**31 for end in ends) or len(values) > arguments.MAX_ITEMS:
            msg = (
                f"{what} must fit into 32 bits, and be at most {arguments.MAX_ITEMS}, found "
                f"{arguments.shown(values)}"
            )
            raise UsageError(msg)
        return np.asarray(values, dtype=np.int64)
    given = values
    if not isinstance(values, list | tuple):
        expected = _NUMBERS + _hint(what, type(values))
        if isinstance(values, Set):
            raise arguments.wrong_type(what, values, expected)
        given = arguments.items(what, values, expected)
    kinds = set(map(type, given))
    if kinds != {int}:
        for kind in kinds:
            if kind is bool or not issubclass(kind, int | np.integer):
                place, bad = next(item for item in enumerate(given) if type(item[1]) is kind)
                expected = "a whole number" + _hint(what, kind)
                raise arguments.wrong_type(f"{what}[{place}]", bad, expected)
        given = list(map(int, given))
    try:
        return np.array(given, dtype=np.int64)
    except OverflowError:
        bad = max(given, key=abs)
        msg = f"{what} must fit into 32 bits, found {arguments.shown(bad)}"
        raise UsageError(msg) from None


def _hint(what: str, kind: type) -> str:
    """Return how a text or messages become tokens, or an empty text."""
    if what == "prompt" and issubclass(kind, Mapping):
        return " (pass a chat as messages=)"
    if what in ("prompt", "tokens"):
        if issubclass(kind, Mapping):
            return " (model.tokenize_chat converts a chat)"
        if issubclass(kind, str):
            return " (model.tokenize converts a text)"
    return ""


def _as_flags(values: Any) -> NDArray[np.int8]:
    """Return which tokens need logits, (n,) int8, without a copy if possible."""
    flags = values
    if not isinstance(values, np.ndarray):
        given = arguments.items("logits", values, _FLAGS)
        if not all(isinstance(each, bool | np.bool_ | int | np.integer) for each in given):
            raise arguments.wrong_type("logits", values, _FLAGS)
        flags = np.array([each == 1 for each in given], dtype=np.int8)
        if any(each not in (0, 1) for each in given):
            raise arguments.wrong_value("logits", values, _FLAGS)
    elif flags.ndim != 1 or (flags.size and flags.dtype.kind not in "biu"):
        raise arguments.wrong_type("logits", values, _FLAGS)
    elif flags.size and flags.dtype.kind != "b" and (flags.min() < 0 or flags.max() > 1):
        raise arguments.wrong_value("logits", values, _FLAGS)
    return np.ascontiguousarray(flags, dtype=np.int8)


def as_list(work: Feed | Batch | Iterable[Feed]) -> Feed | Batch | list[Feed]:
    """Return the items of an iterable of feeds, before the context is locked."""
    return work if isinstance(work, Feed | Batch) else arguments.items("work", work, _WORK)


def to_arrays(context: ContextParts, work: Feed | Batch | Iterable[Feed]) -> BatchArrays:
    """Return the arrays of a batch, or of feeds, each continuing its sequence.

    Raises UsageError for anything else, and Closed for the feed of a closed sequence.
    """
    if isinstance(work, Batch):
        return work.arrays()
    feeds = [work] if isinstance(work, Feed) else arguments.items("work", work, _WORK)
    for feed in feeds:
        if not isinstance(feed, Feed):
            raise arguments.wrong_type("an item of work", feed, _WORK)
        feed.sequence.check(context)
    return _from_feeds(feeds)


def _from_feeds(feeds: list[Feed]) -> BatchArrays:
    if len({id(feed.sequence) for feed in feeds}) != len(feeds):
        msg = "a sequence can be fed once per batch; join its tokens into one feed"
        raise UsageError(msg)
    lengths = [len(feed) for feed in feeds]
    starts = [feed.sequence.next_pos for feed in feeds]
    flags = np.zeros(sum(lengths), dtype=np.int8)
    at = 0
    for feed, length in zip(feeds, lengths, strict=True):
        if feed.logits == "all":
            flags[at : at + length] = 1
        elif feed.logits == "last" and length:
            flags[at + length - 1] = 1
        at += length
    if len(feeds) == 1:
        # A prompt, or a piece of one: its tokens are not copied.
        only, start, n = feeds[0], starts[0], lengths[0]
        pos = np.arange(start, start + n, dtype=np.int32)
        return BatchArrays(only.tokens, pos, None, np.full(n, only.sequence.id, np.int32), flags)
    empty = np.empty(0, dtype=np.int32)
    follow = (np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True))
    return BatchArrays(
        np.concatenate([empty, *(feed.tokens for feed in feeds)]),
        np.concatenate([empty, *follow]),
        None,
        np.repeat(np.array([feed.sequence.id for feed in feeds], dtype=np.int32), lengths),
        flags,
    )


def _check_lengths(arrays: BatchArrays) -> None:
    n = len(arrays.token)
    ids = n if arrays.counts is None else int(arrays.counts.sum())
    for what, part, expected in (
        ("positions", arrays.pos, n),
        ("counts", arrays.counts, n),
        ("sequences", arrays.seq, ids),
        ("logits", arrays.logits, n),
    ):
        if part is not None and len(part) != expected:
            msg = f"{what} has {len(part)} entries for {n} tokens; expected {expected}"
            raise UsageError(msg)
    if arrays.counts is not None and n and int(arrays.counts.min()) < 1:
        msg = "a token needs at least one sequence: counts must be 1 or more"
        raise UsageError(msg)


def check_batch(context: ContextParts, batch: BatchArrays, *, positions: bool = True) -> None:
    """Refuse a batch that would fail an assertion of llama.cpp or be placed wrongly.

    With ``positions`` False, checks are omitted that feeds satisfy by construction.
    """
    n = len(batch.token)
    if n == 0:
        msg = "the batch has no tokens"
        raise UsageError(msg)
    if n > context.info.n_batch:
        msg = (
            f"the batch has {n} tokens and n_batch is {context.info.n_batch}; decode it in pieces "
            "(sequence.prefill does), or create the context with a larger n_batch"
        )
        raise UsageError(msg)
    bad = first_out_of_range(batch.token, context.n_vocab)
    if bad is not None:
        msg = f"token {bad} is out of range: this model has tokens 0..{context.n_vocab - 1}"
        raise UsageError(msg)
    bad = first_out_of_range(batch.seq, context.info.n_seq_max)
    if bad is not None:
        msg = (
            f"sequence {bad} is out of range: this context has sequences "
            f"0..{context.info.n_seq_max - 1} (n_seq_max)"
        )
        raise UsageError(msg)
    if positions:
        _check_positions(context, batch)


def check_pooled_batch(info: ContextInfo, batch: BatchArrays) -> None:
    """Refuse a batch that llama.cpp would pool wrongly, or in which it would assert."""
    n = len(batch.token)
    if info.pooling <= Pooling.NONE:
        return
    if n > info.n_ubatch:
        msg = (
            f"the batch has {n} tokens and n_ubatch is {info.n_ubatch}: tokens to pool must be in "
            "one micro-batch; create the context with a larger n_ubatch and n_batch"
        )
        raise UsageError(msg)
    ids = [each for _, each in positions_and_sequences(batch)]
    found = {one for each in ids for one in each}
    if max(map(len, ids)) > 1 or (len(found) > 1 and not pools_together(info)):
        msg = "tokens to pool are in one sequence each, here in the only one of the batch"
        raise UsageError(msg)
    if max(found) >= n:
        msg = (
            f"sequence {max(found)} needs more tokens in the batch than its number, not {n}: "
            "close sequences with lower numbers first"
        )
        raise UsageError(msg)


def pools_together(info: ContextInfo) -> bool:
    """Return whether several sequences of a batch stay in one micro-batch."""
    return info.n_streams == 1 and not info.memory.keeps_states


def first_out_of_range(values: NDArray[np.int32], end: int) -> int | None:
    """Return a value that is not in 0 <= value < end, None when all are."""
    # A negative number is a large unsigned one, so one pass checks both bounds.
    if np.maximum.reduce(values.view(np.uint32)) < end:
        return None
    low = int(values.min())
    return low if low < 0 else int(values.max())


def _check_positions(context: ContextParts, batch: BatchArrays) -> None:
    expected: dict[int, int] = {}
    shared: set[tuple[int, ...]] = set()
    for pos, ids in positions_and_sequences(batch):
        if len(ids) > 1:
            shared.add(tuple(ids))
        if len(ids) != len(set(ids)):
            msg = f"the token at position {pos} names a sequence twice: {ids}"
            raise UsageError(msg)
        for each in ids:
            there = expected.get(each, -1)
            if there < 0:
                there = context.ledgers[each].next
            if pos != there:
                msg = (
                    f"sequence {each} continues at position {there}, not {pos}: positions must "
                    "be contiguous"
                )
                raise UsageError(msg)
            expected[each] = pos + 1
    if shared and context.stream_per_sequence:
        msg = (
            f"a token names sequences {list(min(shared))}, but each sequence has a stream of its "
            "own cells, and one token cannot belong to several streams: decode it once per "
            "sequence, or create the context with kv_unified=True"
        )
        raise UsageError(msg)
    for owners in sorted(shared):
        swa.check_shared(context.native, context.handle, context.info, owners)


def positions_and_sequences(batch: BatchArrays) -> Iterable[tuple[int, list[int]]]:
    """Return position and sequence ids of each token."""
    seq = batch.seq.tolist()
    if batch.counts is None:
        return ((pos, [i]) for pos, i in zip(batch.pos.tolist(), seq, strict=True))
    ends = batch.counts.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return ((pos, seq[a:b]) for pos, a, b in zip(batch.pos.tolist(), starts, ends, strict=True))
