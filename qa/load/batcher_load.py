"""Continue the requests of a schedule with `Batcher` over `SlotCache`, in this process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyllamakv
from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import UsageError
from pyllamakv.server.server_lab import SLOT
from qa.load.load_result import LoadResult, RequestTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyllamakv.cache.generation import Generation
    from qa.load.request_schedule import LoadRequest


def serve(
    library: Path,
    model: Path,
    requests: Sequence[LoadRequest],
    clients: int,
    threads: int,
    tick: Callable[[int], None],
    *,
    cells: int | None = None,
) -> LoadResult:
    """Submit each request when it arrives; return the result.

    The context has the sizes of a llama-server with ``clients`` slots: its ``cells``, None for a
    share per slot, and its batches of 2,048 tokens in micro-batches of 512. It defragments when
    that pays, as servers through 0.3.16 do by default. Where llama.cpp can decide about flash
    attention, it does, as in a server.
    ``tick`` is called with the number of requests that have ended. CPU time includes the start, as
    that of a server does.
    """
    before = time.process_time()
    with (
        pyllamakv.open(library) as opened,
        opened.load_model(model) as loaded,
        loaded.context(
            n_ctx=cells or clients * SLOT,
            n_batch=2048,
            n_ubatch=512,
            n_seq_max=clients,
            n_threads=threads,
            n_threads_batch=threads,
            defrag_policy="threshold",
            flash_attn=None if Capability.FLASH_AUTO in opened.about.capabilities else False,
        ) as context,
        SlotCache(context) as cache,
        Batcher(cache) as batcher,
    ):
        timings = _drive(batcher, requests, clients, tick)
        used = time.process_time() - before
        return LoadResult(timings, used, batcher.stats().slot_failures)


def _drive(
    batcher: Batcher, requests: Sequence[LoadRequest], clients: int, tick: Callable[[int], None]
) -> tuple[RequestTiming, ...]:
    going: dict[int, Generation] = {}
    first: dict[int, float] = {}
    arrived: dict[int, float] = {}
    timings: dict[int, RequestTiming] = {}
    waiting = list(enumerate(requests))[::-1]
    begin = time.perf_counter()
    while waiting or going:
        now = time.perf_counter() - begin
        due = waiting[-1][1].at if waiting else None
        if not going and due is not None and due > now:
            time.sleep(due - now)
            continue
        while waiting:
            at = waiting[-1][1].at
            if len(going) >= clients if at is None else at > now:
                break
            index, request = waiting.pop()
            arrived[index] = now if at is None else at
            try:
                going[index] = batcher.submit(request.prompt, request.n_predict, stop_at_end=False)
            except UsageError as refused:
                timings[index] = RequestTiming(arrived[index], now, now, 0, f"refused: {refused}")
                tick(len(timings))
        batcher.step()
        now = time.perf_counter() - begin
        for index, one in list(going.items()):
            if one.tokens:
                first.setdefault(index, now)
            if one.done:
                del going[index]
                error = "" if one.finish_reason == "length" else f"{one.finish_reason}: {one.error}"
                timings[index] = RequestTiming(
                    arrived[index], first.get(index, now), now, len(one.tokens), error
                )
                tick(len(timings))
    return tuple(timings[index] for index in sorted(timings))
