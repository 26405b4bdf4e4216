"""Decode a batch, defragment once if that can help, or report why no slot was found."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyllamakv.cache.inspection import describe
from pyllamakv.errors import KVCacheFull, NoKVSlot, StateError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import KVStats

LOGGER = logging.getLogger("pyllamakv.cache")


@dataclass(frozen=True, slots=True)
class CellUsage:
    """Store the cell usage of a cache, of one stream, or of one sequence's share.

    ``largest_hole`` is None if unknown, and ``stats`` if cells cannot be read.
    """

    cells: int
    used: int
    largest_hole: int | None = None
    stats: KVStats | None = None

    @classmethod
    def of(cls, context: Context, stats: KVStats | None) -> CellUsage:
        """Return the cell usage of a whole context, from its ledgers if it cannot show cells."""
        if stats is None:
            return cls(context.info.n_ctx, sum(map(len, context.ledgers)))
        return cls(stats.size, stats.used, stats.largest_hole, stats)

    def full(
        self, message: str, wanted: int, *, defragged: bool = False, cause: str = "full"
    ) -> KVCacheFull:
        """Create the error for ``wanted`` tokens that do not fit."""
        return KVCacheFull(
            message,
            cells=self.cells,
            used=self.used,
            largest_hole=self.largest_hole,
            wanted=wanted,
            defragged=defragged,
            cause=cause,
            stats=self.stats,
        )


def decode_with_defrag(
    context: Context,
    run: Callable[[], None],
    counts: Mapping[int, int],
    relieve: Callable[[], bool] | None = None,
) -> bool:
    """Run a decode of ``counts`` tokens per sequence; return whether a defragmentation helped.

    ``relieve`` frees cells of idle sequences, or returns False; the decode is repeated after it.
    Raises KVCacheFull, and logs the content of the cache at debug level.
    """
    try:
        run()
    except NoKVSlot as error:
        defragged = defragment(context, error)
        if defragged:
            try:
                run()
            except NoKVSlot as again:
                error = again
            else:
                return True
        while relieve is not None and relieve():
            try:
                run()
            except NoKVSlot as again:
                error = again
            else:
                return defragged
        raise cache_full_error(context, error, counts, defragged=defragged) from error
    return False


def defragment(context: Context, error: NoKVSlot) -> bool:
    """Defragment if that can fix a failure; return whether cells were moved."""
    if error.cause != "fragmented":
        return False
    try:
        report = context.kv.defrag()
    except Unsupported:
        return False
    LOGGER.info(
        "defragmented (%s): %s cells moved in %.6f s", report.method, report.cells, report.seconds
    )
    return True


def decode_feed(context: Context, feed: Feed, relieve: Callable[[], bool] | None = None) -> None:
    """Decode a feed as `decode_with_defrag` does. Raises KVCacheFull."""
    counts = {feed.sequence.id: len(feed)}
    decode_with_defrag(context, partial(context.decode, feed), counts, relieve)


def copy_shared_window(context: Context, sequences: Iterable[Sequence]) -> bool:
    """Give a sequence cells of its own, if it shares cells of a sliding window with another.

    llama.cpp drops a cell outside of the window only if one sequence has it. Returns False if none
    shares any, or if no cells are free for the copies.
    """
    if not context.info.n_swa:
        return False
    with context.lock:
        snapshot = context.kv.try_snapshot()
        shared = [cells for cells in snapshot.streams if cells.swa] if snapshot is not None else []
        for each in sequences:
            if any((cells.has(each.id) & (cells.sharers > 1)).any() for cells in shared):
                try:
                    each.restore(each.save(portable=False))
                except (StateError, Unsupported) as error:
                    LOGGER.info("sequence %d keeps its shared cells: %s", each.id, error)
                else:
                    return True
    return False


def cache_full_error(
    context: Context, error: NoKVSlot, counts: Mapping[int, int], *, defragged: bool
) -> KVCacheFull:
    """Create the error for a decode without a slot, and log the state of the cache."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("no room for %s tokens of sequences: %s", dict(counts), describe(context))
    wanted = sum(counts.values())
    there = CellUsage.of(context, error.stats)
    if context.partitions > 1:
        # Each sequence has its own cells: report the one that lacks most.
        with context.lock:
            snapshot = context.kv.try_snapshot()
        streams = snapshot.streams if snapshot is not None else ()
        own = {each.stream: each.stats for each in streams if not each.swa}
        lacking = max(counts, key=lambda i: counts[i] - (own[i].free if i in own else 0))
        if lacking in own:
            wanted, of = counts[lacking], own[lacking]
            there = CellUsage(of.size, of.used, of.largest_hole, error.stats)
    tried = "; a defragmentation did not help" if defragged else ""
    msg = (
        f"the KV cache is full (cells: {there.cells}, used: {there.used}, largest hole: "
        f"{there.largest_hole}, wanted: {wanted}){tried}; nothing was changed: remove tokens and "
        "try again"
    )
    return there.full(msg, wanted, defragged=defragged, cause=error.cause)


def capacity_error(number: int, held: int, wanted: int, capacity: int) -> KVCacheFull:
    """Create the error for a sequence that would have more tokens than its share."""
    msg = (
        f"sequence {number} has {held} of {capacity} tokens and cannot take {wanted} more: the "
        f"rest is "
        "reserved for others; nothing was changed: remove tokens first"
    )
    return CellUsage(capacity, held, max(capacity - held, 0)).full(msg, wanted)


def restore_full_error(sequence: Sequence, wanted: int, error: Exception | str) -> KVCacheFull:
    """Create the error for a sequence that cannot be restored for lack of cells."""
    context = sequence.context
    with context.lock:
        snapshot = context.kv.try_snapshot()
    there = CellUsage.of(context, snapshot.stats if snapshot is not None else None)
    msg = f"no free cells to restore sequence {sequence.id}: {error}"
    return there.full(msg, wanted, defragged=context.info.defrag)
