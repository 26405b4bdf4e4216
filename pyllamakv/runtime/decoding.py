"""Check a batch before C sees it, and explain a decode that failed."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.errors import (
    Cancelled,
    DecodeError,
    KvError,
    NativeError,
    NoKVSlot,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime import windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pyllamakv.runtime.batch import Arrays
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.snapshot import Snapshot


def check_batch(context: Context, batch: Arrays, *, positions: bool = True) -> None:
    """Refuse a batch that llama.cpp would assert on, misread or silently place wrong.

    ``positions`` False leaves out what holds already when feeds were laid out.
    """
    n = len(batch.token)
    if n == 0:
        msg = "there is nothing to decode: the batch has no tokens"
        raise UsageError(msg)
    if n > context.info.n_batch:
        msg = (
            f"the batch has {n} tokens and n_batch is {context.info.n_batch}; decode it in pieces "
            "(context.prefill does), or make the context with a larger n_batch"
        )
        raise UsageError(msg)
    bad = outside(batch.token, context.n_vocab)
    if bad is not None:
        msg = f"token {bad} is out of range: this model has tokens 0..{context.n_vocab - 1}"
        raise UsageError(msg)
    bad = outside(batch.seq, context.info.n_seq_max)
    if bad is not None:
        msg = (
            f"sequence {bad} is out of range: this context has sequences "
            f"0..{context.info.n_seq_max - 1} (n_seq_max)"
        )
        raise UsageError(msg)
    if positions:
        _check_positions(context, batch)


def outside(values: NDArray[np.int32], end: int) -> int | None:
    """Return a value that is not in 0 <= value < end, None when all are."""
    # A negative number is a large one without its sign: one pass finds both.
    if np.maximum.reduce(values.view(np.uint32)) < end:
        return None
    low = int(values.min())
    return low if low < 0 else int(values.max())


def _check_positions(context: Context, batch: Arrays) -> None:
    expected: dict[int, int] = {}
    shared: set[tuple[int, ...]] = set()
    for pos, ids in placed(batch):
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
                    f"sequence {each} goes on at position {there}, not {pos}: positions follow "
                    "each other without a gap"
                )
                raise UsageError(msg)
            expected[each] = pos + 1
    for owners in sorted(shared):
        windows.check_shared(context, owners)


def placed(batch: Arrays) -> Iterable[tuple[int, list[int]]]:
    """Return position and sequence ids of each token."""
    seq = batch.seq.tolist()
    if batch.counts is None:
        return ((pos, [i]) for pos, i in zip(batch.pos.tolist(), seq, strict=True))
    ends = batch.counts.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return ((pos, seq[a:b]) for pos, a, b in zip(batch.pos.tolist(), starts, ends, strict=True))


def record(ledgers: Sequence[Ledger], batch: Arrays, mark: int, epoch: int) -> int:
    """Write a decoded batch into the ledgers; return the next free mark."""
    tokens, seq = batch.token.tolist(), batch.seq.tolist()
    end = mark + len(tokens)
    flags = [0] * (len(tokens) - 1) + [1] if batch.logits is None else batch.logits.tolist()
    if batch.counts is not None:
        for place, (token, flag, (pos, ids)) in enumerate(
            zip(tokens, flags, placed(batch), strict=True)
        ):
            for each in ids:
                ledger = ledgers[each]
                ledger.append(token, pos, mark + place)
                ledger.logits_at, ledger.logits_epoch = (place, epoch) if flag else (-1, -1)
    elif len(seq) > 1 and seq.count(seq[0]) == len(seq):
        # A piece of one prompt: whole lists, where a long one would take its time one by one.
        ledger = ledgers[seq[0]]
        ledger.extend(tokens, batch.pos.tolist(), range(mark, end))
        ledger.logits_at, ledger.logits_epoch = (len(seq) - 1, epoch) if flags[-1] else (-1, -1)
    else:
        places = zip(seq, tokens, batch.pos.tolist(), flags, strict=True)
        for place, (each, token, pos, flag) in enumerate(places):
            ledger = ledgers[each]
            ledger.append(token, pos, mark + place)
            ledger.logits_at, ledger.logits_epoch = (place, epoch) if flag else (-1, -1)
    return end


def failure(
    context: Context, code: int, ids: Sequence[int], n_tokens: int | None = None
) -> KvError:
    """Make the error for a decode that returned ``code``; the context's turn is held.

    ``ids`` has the sequences of each token; ``n_tokens`` None: there is a token for each.
    """
    n = len(ids) if n_tokens is None else n_tokens
    kept = _kept(context)
    if code == 2:
        msg = f"the decode of {n} tokens was cancelled; {kept}"
        return Cancelled(msg, code=code)
    if code != 1:
        msg = f"llama_decode gave {code} for {n} tokens; {kept}"
        return DecodeError(msg, code=code)
    snapshot = context.kv.peek()
    if snapshot is None or not snapshot.streams:
        msg = f"no cells were found for {n} tokens; this build cannot say why; {kept}"
        return NoKVSlot(msg, cause="other", n_tokens=n)
    cause, text = _cause(snapshot, n, Counter(ids), context)
    return NoKVSlot(text, cause=cause, n_tokens=n, stats=snapshot.stats)


def _cause(snapshot: Snapshot, n: int, counts: Counter[int], context: Context) -> tuple[str, str]:
    stats = snapshot.stats
    numbers = (
        f"{n} tokens, {stats.free} of {stats.size} cells free in {stats.holes} holes, "
        f"the largest of {stats.largest_hole}"
    )
    full = stats.free < n
    if context.streams:
        # Each sequence has cells of its own; the stream of a sequence has its number.
        free = {each.stream: each.stats.free for each in snapshot.streams if not each.swa}
        full = any(free.get(each, k) < k for each, k in counts.items())
    if full:
        return "full", (
            f"the KV cache is full: {numbers}; remove tokens, or make the context with a larger "
            f"n_ctx; {_kept(context)}"
        )
    behind = windows.full(context, snapshot, counts, n)
    if behind:
        return "full", (
            f"the KV cache is full: {numbers}, but {behind}; remove one of the sequences that "
            f"share tokens, or make the context with swa_full=True; {_kept(context)}"
        )
    if context.info.contiguous_slots is not False and stats.holes > 1:
        cure = "kv.defrag() and decode again" if context.info.defrag else "remove more tokens"
        return "fragmented", (f"the KV cache is fragmented: {numbers}; {cure}; {_kept(context)}")
    return "other", f"no cells were found although there are enough: {numbers}"


def threw(context: Context, error: BaseException, ids: Iterable[int]) -> None:
    """Settle what a decode left that threw or was interrupted; the context's turn is held.

    Raises DecodeError for the library's own exceptions; the others are the caller's to raise.
    """
    if type(error) is NativeError:
        context.emptied = settle(context, ids, halfway=True)
        raise DecodeError(str(error), code=error.code, log=error.log) from error
    if not isinstance(error, KvError):
        # Ctrl-C, or what another signal's handler raised. Python raises it when C is back: the
        # decode may well have succeeded, and nobody has recorded its tokens.
        with suppress(KvError):
            context.native.cancel(context.handle)  # a worker may still be at it
        context.emptied = settle(context, ids, halfway=True)


def settle(context: Context, sequences: Iterable[int], *, halfway: bool = False) -> tuple[int, ...]:
    """Remove what a failed decode left behind its back, so that cache and ledger agree.

    The shim undoes failed decodes; this is the second net, and only for positions that no ledger
    has. Returns the sequences that had to be emptied: a state cannot go back, nor a window whose
    cells were given away. ``halfway`` says that a computation was broken off, which moves the
    states of sequences that are not even in the batch: then all are emptied.
    """
    emptied: list[int] = []
    if halfway and context.guard and context.info.memory.keeps_states:
        return _forget(context)
    for each in sorted(set(sequences)) if context.guard else ():
        ledger = context.ledgers[each]
        try:
            kept = True
            if context.native.seq_pos_max(context.handle, each) >= ledger.next:
                kept = context.native.seq_rm(context.handle, each, ledger.next, -1)
            if not kept or windows.lacking(context, each, ledger.positions) is not None:
                context.native.seq_rm(context.handle, each, -1, -1)
                ledger.clear()
                emptied.append(each)
        except WorkerDied:
            break
    return tuple(emptied)


def _forget(context: Context) -> tuple[int, ...]:
    """Empty a whole context, and return the sequences that had anything."""
    emptied = [number for number, ledger in enumerate(context.ledgers) if len(ledger)]
    with suppress(WorkerDied):
        # Not one by one: some releases begin no state where another was removed.
        context.native.clear(context.handle, True)
    for ledger in context.ledgers:
        ledger.clear()
    return tuple(emptied)


def _kept(context: Context) -> str:
    if not context.emptied:
        return "every sequence kept its tokens"
    return (
        f"this memory cannot go back, so sequences {', '.join(map(str, context.emptied))} were "
        "emptied; the others kept their tokens"
    )
