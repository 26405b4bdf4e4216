"""Decode where cells are scattered, and say what a cache had that found no room."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pyllamakv.errors import KVCacheFull, NoKVSlot, Unsupported

if TYPE_CHECKING:
    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.context import Context


def decode(context: Context, feed: Feed) -> None:
    """Decode, defragmenting once where that helps; raises KVCacheFull where nothing does."""
    try:
        context.decode(feed)
    except NoKVSlot as error:
        if not defrag(context, error):
            raise full(error, defragged=False) from error
        try:
            context.decode(feed)
        except NoKVSlot as again:
            raise full(again, defragged=True) from error


def defrag(context: Context, error: NoKVSlot) -> bool:
    """Defragment where that may cure a failure; True when it was done."""
    if error.cause == "fragmented":
        with suppress(Unsupported):
            context.kv.defrag()
            return True
    return False


def full(error: NoKVSlot, *, defragged: bool) -> KVCacheFull:
    """Say of a decode that found no cells what the cache had."""
    stats = error.stats
    return KVCacheFull(
        str(error),
        cells=stats.size if stats is not None else 0,
        used=stats.used if stats is not None else 0,
        largest_hole=stats.largest_hole if stats is not None else None,
        wanted=error.n_tokens,
        defragged=defragged,
        cause=error.cause,
        stats=stats,
    )
