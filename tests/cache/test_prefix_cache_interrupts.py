"""Test Ctrl-C in any call of the library by a cache manager: no token is lost or wrong."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import prefix_kit
import pytest
import runtime_kit as kit

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.inspection import check_ledgers
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyllamakv.runtime.context import Context

CHANGES = ("seq_rm", "seq_cp", "seq_add", "state_save", "state_load", "clear", "defrag", "update")
CHATS = [[*prefix_kit.SYSTEM, *[number] * 15] for number in (3, 4, 5)]
LATE = [*prefix_kit.SYSTEM, *[7] * 18]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Handle SIGINT as Python does, whatever ran before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def attention(folder: Path) -> Context:
    """Return a context in which three chats fit."""
    return kit.context(folder, n_ctx=96, n_seq_max=3)


def recurrent(folder: Path) -> Context:
    """Return a context whose memory has one state per sequence."""
    context = kit.context(folder, {"partial": False}, n_ctx=96, n_seq_max=3)
    object.__setattr__(context.info, "memory", MemoryType.RECURRENT)
    return context


MANAGERS: dict[str, Callable[[Context, Path], Any]] = {
    "dropping": lambda context, _: PrefixCache(context),
    "memory": lambda context, _: PrefixCache(context, paging="memory"),
    "files": lambda context, folder: PrefixCache(context, paging=folder / "pages"),
    "store": lambda context, folder: PrefixCache(context, store=folder / "store"),
    "slots": lambda context, _: SlotCache(context, size=60),
}


def serve(cache: Any, prompt: list[int]) -> Any:
    """Decode a prompt; return a copy of its logits."""
    with cache.acquire(prompt) as lease:
        (lease.decode if isinstance(cache, SlotCache) else lease.prefill)()
        return lease.sequence.logits().copy()


def acquire(cache: Any) -> None:
    """Serve a new prompt, which evicts a chat, and the evicted one."""
    serve(cache, LATE)
    serve(cache, [*CHATS[0], 8])


def park(cache: Any) -> None:
    """Park a lease for two prompts, and resume it."""
    with cache.acquire([*CHATS[1], 9]) as lease:
        lease.make_room(1)
        (lease.decode if isinstance(cache, SlotCache) else lease.prefill)()
        parked = lease.park()
    try:
        acquire(cache)
        with parked.resume([*CHATS[1], 9, 9]) as lease:
            lease.make_room(1)
    finally:
        parked.close()


@pytest.mark.slow
@pytest.mark.regression(
    "Ctrl-C during a page-out left a branch without its prefix, whose later tokens were wrong, or"
    " an unusable sequence",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize("act", [acquire, park])
@pytest.mark.parametrize("memory", [attention, recurrent])
@pytest.mark.parametrize("name", MANAGERS)
def test_interrupted_call_is_undone_or_completed(
    tmp_path: Path, name: str, memory: Callable[[Path], Context], act: Callable[[Any], None]
) -> None:
    """After each interrupted call, every prompt has the logits of a new decode."""
    prompts = [[*each, 8] for each in (*CHATS, LATE, [*CHATS[1], 9])]
    with memory(tmp_path) as context, PrefixCache(context) as alone:
        fresh = []
        for prompt in prompts:
            alone.clear()
            fresh.append(serve(alone, prompt))
    number, more = 0, True
    while more:
        number += 1
        folder = tmp_path / str(number)
        context = memory(tmp_path)
        cache = MANAGERS[name](context, folder)
        for chat in CHATS:
            serve(cache, chat)
        with kit.interrupted(context.native, CHANGES, number) as calls:
            try:
                act(cache)
            except KeyboardInterrupt:
                assert len(calls) >= number
            else:
                more = False
        cache.check()
        check_ledgers(context)
        numbers = cache.stats().to_json()
        assert numbers.get("in_use", numbers.get("leased")) == 0
        for prompt, expected in zip(prompts, fresh, strict=True):
            assert (serve(cache, prompt) == expected).all()
        cache.check()
        cache.close()
        assert context.kv.stats.used == 0
    assert number > 2


@pytest.mark.regression(
    "after Ctrl-C during the close of a prefix cache, the lock of its store was still held",
    by="hostile input",
    of="Python",
)
def test_an_interrupted_close_is_complete(tmp_path: Path) -> None:
    """After Ctrl-C in any call, the sequences are free, and so is the store."""
    number, more = 0, True
    while more:
        number += 1
        context = attention(tmp_path)
        cache = PrefixCache(context, store=tmp_path / "store")
        serve(cache, CHATS[0])
        serve(cache, [number])
        with kit.interrupted(context.native, CHANGES, number) as calls:
            try:
                cache.close()
            except KeyboardInterrupt:
                assert len(calls) >= number
            else:
                more = False
        assert context.kv.stats.used == 0
    assert number > 2
    with PrefixCache(attention(tmp_path), store=tmp_path / "store") as cache:
        assert cache.acquire([*CHATS[0], 8]).cached == len(CHATS[0])
