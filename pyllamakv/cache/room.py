"""Find room for a batch: decode, defragment once where that can help, or say why there is none."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from pyllamakv.cache.inspecting import describe
from pyllamakv.errors import KVCacheFull, NoKVSlot, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import KVStats

LOGGER = logging.getLogger("pyllamakv.cache")


def decode(context: Context, run: Callable[[], None], counts: Mapping[int, int]) -> bool:
    """Run a decode of ``counts`` tokens per sequence; return whether a defragmentation helped.

    Raises KVCacheFull; what the cache then holds goes to the debug log.
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
        raise full(context, error, counts, defragged=defragged) from error
    return False


def defragment(context: Context, error: NoKVSlot) -> bool:
    """Defragment where that may cure a failure; True when it was done."""
    if error.cause != "fragmented":
        return False
    try:
        report = context.kv.defrag()
    except Unsupported:
        return False
    LOGGER.info("defragmented: %s cells moved in %.6f s", report.cells, report.seconds)
    return True


def decode_feed(context: Context, feed: Feed) -> None:
    """Decode a feed, defragmenting once where that helps; raises KVCacheFull."""
    decode(context, partial(context.decode, feed), {feed.sequence.id: len(feed)})


def full(
    context: Context, error: NoKVSlot, counts: Mapping[int, int], *, defragged: bool
) -> KVCacheFull:
    """Make the error for a decode that found no room, and log what the cache holds."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("no room for %s tokens of sequences: %s", dict(counts), describe(context))
    wanted = sum(counts.values())
    stats: KVStats | None = error.stats
    cells = stats.size if stats else context.info.n_ctx
    used = stats.used if stats else sum(map(len, context.ledgers))
    hole = stats.largest_hole if stats else None
    if context.streams:
        # Each sequence has cells of its own: tell of the one that lacks most.
        with context.turn:
            snapshot = context.kv.peek()
        streams = snapshot.streams if snapshot is not None else ()
        own = {each.stream: each.stats for each in streams if not each.swa}
        lacking = max(counts, key=lambda i: counts[i] - (own[i].free if i in own else 0))
        if lacking in own:
            wanted = counts[lacking]
            cells, used = own[lacking].size, own[lacking].used
            hole = own[lacking].largest_hole
    tried = "; a defragmentation did not help" if defragged else ""
    msg = (
        f"the KV cache has no room (cells: {cells}, used: {used}, largest hole: {hole}, wanted: "
        f"{wanted}){tried}; nothing was changed: remove tokens and try again"
    )
    return KVCacheFull(
        msg,
        cells=cells,
        used=used,
        largest_hole=hole,
        wanted=wanted,
        defragged=defragged,
        cause=error.cause,
        stats=stats,
    )


def beyond(number: int, held: int, wanted: int, capacity: int) -> KVCacheFull:
    """Make the error for a sequence that would have more tokens than its share."""
    msg = (
        f"sequence {number} has {held} of {capacity} tokens and cannot take {wanted} more: what "
        "others may need was reserved for them; nothing was changed: remove tokens first"
    )
    free = max(capacity - held, 0)
    return KVCacheFull(msg, cells=capacity, used=held, largest_hole=free, wanted=wanted)


def no_room(lane: Sequence, wanted: int, error: Exception | str) -> KVCacheFull:
    """Make the error for a sequence that finds no cells to be restored into."""
    context = lane.context
    with context.turn:
        snapshot = context.kv.peek()
    stats = snapshot.stats if snapshot is not None else None
    msg = f"there is no room to restore sequence {lane.id}: {error}"
    return KVCacheFull(
        msg,
        cells=stats.size if stats else context.info.n_ctx,
        used=stats.used if stats else sum(map(len, context.ledgers)),
        largest_hole=stats.largest_hole if stats else None,
        wanted=wanted,
        defragged=context.info.defrag,
        stats=stats,
    )
