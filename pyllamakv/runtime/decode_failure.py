"""Explain a failed decode, and restore the previous state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import (
    Cancelled,
    DecodeError,
    KvError,
    NoKVSlot,
    PromptTooLong,
    WorkerDied,
)
from pyllamakv.runtime import swa

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.binding.protocol import ContextHandle, ContextInfo, Native
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.parts import ContextParts
    from pyllamakv.runtime.snapshot import Snapshot


def failure(
    context: ContextParts, code: int, ids: Sequence[int], n_tokens: int | None = None
) -> KvError:
    """Create the error for a decode that returned ``code``; the caller holds the context's lock.

    ``ids`` has the sequences of each token; ``n_tokens`` None: there is a token for each.
    """
    n = len(ids) if n_tokens is None else n_tokens
    kept = _outcome(context.emptied)
    if code == 2:
        msg = f"the decode of {n} tokens was cancelled; {kept}"
        return Cancelled(msg, code=code)
    if code != 1:
        msg = f"llama_decode returned {code} for {n} tokens; {kept}"
        return DecodeError(msg, code=code)
    snapshot = context.kv.try_snapshot()
    if snapshot is None or not snapshot.streams:
        msg = f"no slot for {n} tokens, for an unknown reason in this build; {kept}"
        return NoKVSlot(msg, cause="other", n_tokens=n)
    cause, text = _cause(
        snapshot,
        n,
        Counter(ids),
        context.info,
        kept,
        stream_per_sequence=context.stream_per_sequence,
    )
    return NoKVSlot(text, cause=cause, n_tokens=n, stats=snapshot.stats)


def check_length(context: ContextParts, n_tokens: int) -> None:
    """Raise PromptTooLong if no sequence of ``n_tokens`` fits into the cache of a context.

    Memory without cells has no such limit, and a build that cannot read cells has no check.
    """
    if n_tokens <= context.info.n_ctx // context.partitions:
        return
    with context.lock:
        snapshot = context.kv.try_snapshot()
    sizes = [each.stats.size for each in snapshot.streams if not each.swa] if snapshot else []
    if sizes and n_tokens > max(sizes):
        where = "stream" if context.partitions > 1 else "cache"
        msg = (
            f"a sequence of {n_tokens} tokens does not fit into a {where} of {max(sizes)} cells: "
            f"shorten it, or create the context with a larger n_ctx"
        )
        raise PromptTooLong(msg, needed=n_tokens, available=max(sizes))


def _cause(
    snapshot: Snapshot,
    n: int,
    counts: Counter[int],
    info: ContextInfo,
    kept: str,
    *,
    stream_per_sequence: bool,
) -> tuple[str, str]:
    """Return the cause of NoKVSlot and its message, which ends with ``kept``."""
    stats = snapshot.stats
    numbers = (
        f"{n} tokens, {stats.free} of {stats.size} cells free in {stats.holes} holes, "
        f"the largest of {stats.largest_hole}"
    )
    full = stats.free < n
    if stream_per_sequence:
        # Each sequence has its own cells; the number of its stream is its id.
        free = {each.stream: each.stats.free for each in snapshot.streams if not each.swa}
        full = any(free.get(each, k) < k for each, k in counts.items())
    if full:
        return "full", (
            f"the KV cache is full: {numbers}; remove tokens, or create the context with a larger "
            f"n_ctx; {kept}"
        )
    wanted = counts if stream_per_sequence else n
    behind = swa.full_reason(snapshot, info.n_swa, wanted)
    if behind:
        return "full", (
            f"the KV cache is full: {numbers}, but {behind}; remove one of the sequences that "
            f"share tokens, or make the context with swa_full=True; {kept}"
        )
    if info.contiguous_slots is not False and stats.holes > 1:
        hint = "kv.defrag() and decode again" if info.defrag else "remove more tokens"
        return "fragmented", f"the KV cache is fragmented: {numbers}; {hint}; {kept}"
    return "other", f"no cells were found although there are enough: {numbers}"


def roll_back(
    context: ContextParts, sequences: Iterable[int], *, halfway: bool = False
) -> tuple[int, ...]:
    """Remove the remaining tokens of a failed decode, so that cache and ledgers agree.

    The shim undoes failed decodes; this removes positions that no ledger has. Returns the
    sequences that had to be emptied: a state cannot go back, nor a window whose cells were reused.
    ``halfway`` means that a computation was interrupted, which changes the states of sequences
    outside the batch as well: then all of them are emptied.
    """
    emptied: list[int] = []
    if context.info.memory is MemoryType.NONE:
        return ()
    if halfway and context.guard and context.info.memory.keeps_states:
        return _empty_all(context.native, context.handle, context.ledgers)
    n_swa, kv = context.info.n_swa, context.kv
    for each in sorted(set(sequences)) if context.guard else ():
        ledger = context.ledgers[each]
        try:
            kept = True
            if context.native.seq_pos_max(context.handle, each) >= ledger.next:
                kept = context.native.seq_rm(context.handle, each, ledger.next, -1)
            kept = kept and swa.first_missing_position(n_swa, kv, each, ledger.positions) is None
            if not kept:
                context.native.seq_rm(context.handle, each, -1, -1)
                ledger.clear()
                emptied.append(each)
        except WorkerDied:
            break
    return tuple(emptied)


def _empty_all(
    native: Native, handle: ContextHandle, ledgers: tuple[Ledger, ...]
) -> tuple[int, ...]:
    """Empty a whole context, and return the sequences that had anything."""
    emptied = [number for number, ledger in enumerate(ledgers) if len(ledger)]
    try:
        # Not one by one, because some releases cannot start a state in place of a removed one.
        native.clear(handle, True)
    except WorkerDied:
        return ()
    for ledger in ledgers:
        ledger.clear()
    return tuple(emptied)


def _outcome(emptied: tuple[int, ...]) -> str:
    if not emptied:
        return "every sequence kept its tokens"
    return (
        f"this memory cannot remove tokens, so sequences {', '.join(map(str, emptied))} were "
        "emptied; the others kept their tokens"
    )
