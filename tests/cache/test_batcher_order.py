"""Test which prompt a batcher admits next: deferral, cached prefixes, priorities, refusals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import async_batcher
from pyllamakv.cache import batcher as batchers
from pyllamakv.cache.async_batcher import AsyncBatcher
from pyllamakv.cache.batcher import MAX_DEFER, Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    ArgumentTypeError,
    BudgetTooSmall,
    NoSlotAvailable,
    PromptTooLong,
    UsageError,
)
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.generation import Generation
    from pyllamakv.runtime.context import Context


USERS = 8
#: Tokens that all users have in common.
COMMON = [1 + (7 * i * i + i) % 60 for i in range(400)]


def burst(batcher: Batcher) -> list[Generation]:
    """Complete the prompts of 8 users, which are submitted together."""
    tails = [[1 + 7 * i % 60, 1 + (5 * i + 1) % 60, *range(1, 10 + i)] for i in range(USERS)]
    users = [batcher.submit([*COMMON, *tail], 4, stop_at_end=False) for tail in tails]
    batcher.run()
    assert {one.finish_reason for one in users} == {"length"}
    return users


def reused(users: list[Generation]) -> float:
    """Return the share of the possible reuse: all but the first one reuse what they share."""
    found = sum(min(one.cached or 0, len(COMMON)) for one in users)
    return found / ((USERS - 1) * len(COMMON))


def context(folder: Path, memory: MemoryType, **options: Any) -> Context:
    """Return a context of 4,096 cells with a kind of memory."""
    rewinds = memory is MemoryType.ATTENTION
    ctx = kit.context(folder, {} if rewinds else {"partial": False}, n_ctx=4096, **options)
    object.__setattr__(ctx.info, "memory", memory)
    return ctx


@pytest.mark.parametrize(
    ("manager", "n_seq_max"), [(PrefixCache, 4), (PrefixCache, 9), (SlotCache, 9)]
)
@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.SWA, MemoryType.HYBRID])
def test_a_burst_evaluates_its_common_prefix_once(
    tmp_path: Path, memory: MemoryType, n_seq_max: int, manager: Any
) -> None:
    """It is if not all fit at once too; no prompt waits longer than the bound."""
    ctx = context(tmp_path, memory, n_seq_max=n_seq_max)
    with manager(ctx) as cache, Batcher(cache) as batcher:
        users = burst(batcher)
    assert reused(users) >= 0.95
    # An ended generation keeps no other one in memory.
    assert {one.awaits for one in users} == {None}
    assert max(one.deferred for one in users) <= -(-len(COMMON) // batcher.n_batch) < MAX_DEFER


@pytest.mark.parametrize(
    ("memory", "reuses"), [(MemoryType.ATTENTION, False), (MemoryType.HYBRID, True)]
)
def test_prompts_are_deferred_over_slots_in_use_only_for_states(
    tmp_path: Path, memory: MemoryType, reuses: bool
) -> None:
    """The policy "longest" shares no cells with slots in use, so waiting would be useless."""
    ctx = context(tmp_path, memory, n_seq_max=9)
    with SlotCache(ctx, policy="longest") as cache, Batcher(cache) as batcher:
        users = burst(batcher)
    assert (reused(users) >= 0.95) is reuses
    assert (sum(one.deferred for one in users) > 0) is reuses


def test_tasks_of_a_memory_with_states_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first one evaluates the prefix before another one needs a state after it."""
    monkeypatch.setattr(async_batcher, "GATHER_SECONDS", 60.0)
    ctx = context(tmp_path, MemoryType.HYBRID, n_seq_max=8, n_batch=512, n_ubatch=512)

    async def serve() -> list[Generation]:
        async with AsyncBatcher(cache) as front:
            prompts = ([*COMMON, 5 + i, 6] for i in range(8))
            users = await asyncio.gather(*(front.submit(each, 2) for each in prompts))
            await asyncio.gather(*(one.result() for one in users))
            return [one.generation for one in users]

    with PrefixCache(ctx) as cache:
        assert reused(asyncio.run(serve())) >= 0.95


@pytest.mark.parametrize(
    ("manager", "limit", "defer", "n"),
    [
        (PrefixCache, {"entries": 2}, MAX_DEFER, 2),
        (SlotCache, {"n_slots": 2}, MAX_DEFER, 2),
        (PrefixCache, {}, 0, 1),
    ],
    ids=["entries", "slots", "no deferral"],
)
def test_tasks_are_not_gathered_without_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: Any, limit: Any, defer: int, n: int
) -> None:
    """The manager serves no more prompts at once, or none is deferred."""
    monkeypatch.setattr(async_batcher, "GATHER_SECONDS", 3600.0)
    ctx = context(tmp_path, MemoryType.HYBRID, n_seq_max=8)

    async def serve() -> None:
        async with AsyncBatcher(cache, max_defer=defer) as front:
            async with asyncio.timeout(20):  # a failure instead of a hang
                users = await asyncio.gather(*(front.submit([5 + i, 6], 2) for i in range(n)))
                await asyncio.gather(*(one.result() for one in users))

    with manager(ctx, **limit) as cache:
        asyncio.run(serve())


def test_nobody_waits_longer_than_the_bound(tmp_path: Path) -> None:
    """If a prefix takes more steps and is not cached, each prompt evaluates it."""
    ctx = context(tmp_path, MemoryType.ATTENTION, n_seq_max=9)
    with PrefixCache(ctx) as cache, Batcher(cache, max_defer=10) as batcher:
        users = burst(batcher)
        assert [one.deferred for one in users] == [0, *[10] * 7]
        assert all(one.cached == 320 for one in users[1:])


def test_a_deferred_prompt_does_not_delay_others(tmp_path: Path) -> None:
    """Another prompt is admitted first; if the evaluating one ends early, it starts at once."""
    with (
        PrefixCache(context(tmp_path, MemoryType.ATTENTION)) as cache,
        Batcher(cache, n_batch=16) as batcher,
    ):
        first, second = (batcher.submit([*COMMON, i], 4) for i in (5, 6))
        other = batcher.submit([9, 8, 7], 4, stop_at_end=False)
        batcher.step()
        assert [one.lease is not None for one in (first, second, other)] == [True, False, True]
        first.cancel()
        batcher.step()
        assert second.lease is not None
        assert second.cached == 16
        third = batcher.submit([*COMMON, 7], 4)
        batcher.step()
        assert third.awaits is not None
        third.cancel()
        batcher.run()
        assert third.awaits is None  # otherwise a chain of ended generations stays in memory


def test_nothing_is_parked_for_a_deferred_prompt(tmp_path: Path) -> None:
    """It could not be admitted, so that the parked one would be resumed in the same step."""
    ctx = context(tmp_path, MemoryType.ATTENTION, n_seq_max=2)
    with PrefixCache(ctx) as cache, Batcher(cache, n_batch=8, max_wait=10) as batcher:
        batcher.submit([9, 8, 7], None, stop_at_end=False)
        batcher.submit([*COMMON, 5], None, stop_at_end=False)
        batcher.step()
        waiting = batcher.submit([*COMMON, 6], 1, stop_at_end=False)
        while waiting.lease is None and not waiting.done:
            batcher.step()
        assert waiting.deferred > 30
        assert batcher.stats().parks == 1
        assert waiting.cached == len(COMMON)


def test_prompts_of_other_salts_do_not_wait(tmp_path: Path) -> None:
    """They cannot reuse the tokens, and get no information about them."""
    ctx = context(tmp_path, MemoryType.ATTENTION)
    with PrefixCache(ctx) as cache, Batcher(cache) as batcher:
        users = [batcher.submit([*COMMON, 5], 1, salt=salt) for salt in ("a", "b", None, "a")]
        batcher.run()
        assert [one.deferred > 0 for one in users] == [False, False, False, True]
        assert [one.cached for one in users] == [0, 0, 0, 400]


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("0.3.9+patched", "sliding", {}),
        ("0.3.9+patched", "recurrent", {}),
        ("b11549+patched", "tiny", {}),
        ("b11549+patched", "tiny", {"kv_unified": False}),
        ("b11549+patched", "sliding", {}),
        ("b11549+patched", "sliding", {"swa_full": True}),
        ("b11549+patched", "hybrid", {}),
    ],
)
def test_a_burst_reuses_its_prefix_in_real_memories(
    spec: str, name: str, options: dict[str, bool]
) -> None:
    """The texts are those of prompts that are evaluated alone."""
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.model(name)) as model,
    ):
        found = []
        for defer in (MAX_DEFER, 0):
            ctx = model.context(4096, 64, 64, USERS + 1, 1, **options)
            with ctx, kv.PrefixCache(ctx) as cache, Batcher(cache, max_defer=defer) as batcher:
                users = burst(batcher)
                cache.check()
                found.append((reused(users), [one.tokens for one in users]))
    (deferred, texts), (alone, same) = found
    assert deferred >= 0.95 > alone
    assert texts == same


def admitted(users: list[Generation]) -> list[int]:
    """Return the numbers of generations in the order in which they began."""
    return [i for _, i in sorted((one.since, i) for i, one in enumerate(users))]


def single(folder: Path) -> PrefixCache:
    """Return a cache of one sequence, which serves prompts one after another."""
    return PrefixCache(kit.context(folder, n_ctx=256, n_seq_max=1))


@pytest.mark.parametrize("slots", [False, True])
def test_the_longest_cached_prefix_comes_first(tmp_path: Path, slots: bool) -> None:
    """It does, unless another prompt has waited for the maximum steps of a deferral."""
    prompt = COMMON[:60]
    with SlotCache(kit.context(tmp_path, n_ctx=256), 1) if slots else single(tmp_path) as cache:
        for defer, order in ((MAX_DEFER, [2, 1, 0]), (0, [0, 1, 2])):
            with Batcher(cache, max_defer=defer) as batcher:
                batcher.submit([*prompt, 9], 1).result()
                users = [
                    batcher.submit([*prompt[:n], *range(70, 90)], 2, stop_at_end=False)
                    for n in (0, 20, 50)
                ]
                batcher.run()
            assert admitted(users) == order
        with Batcher(cache, max_defer=12) as batcher:
            going = batcher.submit(prompt, 20, stop_at_end=False)
            batcher.step()
            late, cached = batcher.submit([100, 101], 1), batcher.submit([*prompt, 7], 1)
            batcher.run()
            assert going.finish_reason == "length"
            assert admitted([late, cached]) == [0, 1]


def test_a_step_asks_once_for_the_cached_prefix_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask again for each prompt that is admitted before."""
    asked: list[bytes] = []
    real = PrefixCache.cached_length

    def count(self: PrefixCache, tokens: Any, **options: Any) -> int:
        asked.append(tokens.tobytes())
        return real(self, tokens, **options)

    monkeypatch.setattr(PrefixCache, "cached_length", kit.ours(count))
    ctx = kit.context(tmp_path, n_ctx=256, n_seq_max=6)
    with PrefixCache(ctx) as cache, Batcher(cache) as batcher:
        for i in range(6):
            batcher.submit([50 + i], 2)
        batcher.step()
        assert len(asked) == len(set(asked)) == 6


def test_priorities_order_those_that_wait(tmp_path: Path) -> None:
    """The highest is admitted first; equal ones in the order of submission."""
    with single(tmp_path) as cache, Batcher(cache) as batcher:
        users = [
            batcher.submit([50 + i], 2, priority=priority, stop_at_end=False)
            for i, priority in enumerate((0, -1, 5, 0, 5, 100, -100))
        ]
        batcher.run()
        assert admitted(users) == [5, 2, 4, 0, 3, 1, 6]
        for wrong in (101, -101, "high", 1.5, None):
            with pytest.raises((UsageError, ArgumentTypeError)):
                batcher.submit([5], priority=wrong)


def test_the_lowest_priority_does_not_starve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After enough steps it precedes later prompts with a higher priority."""
    monkeypatch.setattr(batchers, "AGING_STEPS", 10)
    with single(tmp_path) as cache, Batcher(cache) as batcher:
        low = batcher.submit([99], 1, priority=-2)
        for i in range(100):
            batcher.submit([50 + i % 20], 2, priority=1, stop_at_end=False)
            batcher.step()
            batcher.step()
            if low.done:
                break
        assert low.done
        assert 30 <= low.since <= 40
        batcher.close()


def test_the_lowest_priority_is_parked_first(tmp_path: Path) -> None:
    """If cells run short, a prompt that was submitted before it continues."""
    ctx = kit.context(tmp_path, n_ctx=64, n_seq_max=4)
    with PrefixCache(ctx) as cache, Batcher(cache) as batcher:
        users = [
            batcher.submit([50 + i, 60 + i], 30, priority=priority, stop_at_end=False)
            for i, priority in enumerate((0, 1, 1))
        ]
        while not batcher.stats().parks:
            assert batcher.step()
        assert [one.parked is not None for one in users] == [True, False, False]
        batcher.run()
        assert {one.finish_reason for one in users} == {"length"}


def test_a_prompt_that_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    """The limits are the cells, and the budget of the cache."""
    ctx = kit.context(tmp_path, n_ctx=256)
    with PrefixCache(ctx, budget=1 << 11) as cache, Batcher(cache) as batcher:
        with pytest.raises(PromptTooLong, match="257 tokens"):
            batcher.submit([5] * 257)
        with pytest.raises(BudgetTooSmall, match="increase the budget"):
            batcher.submit([5] * 250)

        async def submit() -> None:
            async with AsyncBatcher(cache) as front:
                with pytest.raises(PromptTooLong):
                    await front.submit([5] * 257)
                with pytest.raises(BudgetTooSmall):
                    await front.submit([5] * 250)

        asyncio.run(submit())
        assert batcher.stats().waiting == 0


def test_a_pin_without_a_free_sequence_needs_a_checkpoint(tmp_path: Path) -> None:
    """Its state cannot be evaluated again while all sequences are leased."""
    ctx = context(tmp_path, MemoryType.HYBRID, n_seq_max=2)
    with PrefixCache(ctx) as cache, Batcher(cache) as batcher:
        for checkpoints in ([], [20]):
            prompt = [3 + len(checkpoints), *COMMON[:60]]
            batcher.submit(prompt, 8, stop_at_end=False, checkpoints=checkpoints)
        for _ in range(4):
            batcher.step()
        with pytest.raises(NoSlotAvailable, match=r"checkpoints=\[20\]"):
            cache.pin("without", [3, *COMMON[:19]])
        cache.pin("with", [4, *COMMON[:19]])
        batcher.run()
        cache.check()
    assert cache.pins.keys() == {"with"}


@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.SWA, MemoryType.HYBRID])
@pytest.mark.parametrize("steps", [4, 20])
def test_what_a_batcher_holds_can_be_pinned(tmp_path: Path, memory: MemoryType, steps: int) -> None:
    """It can during a generation and afterwards, at every length: also without a state there."""
    with PrefixCache(context(tmp_path, memory)) as cache, Batcher(cache) as batcher:
        one = batcher.submit([*COMMON[:60], 5, 6], 8, stop_at_end=False)
        for _ in range(steps):
            batcher.step()
        for length in (20, 60, 61, 62):
            cache.pin("system", one.prompt[:length])
            cache.check()
        cache.pin("system", COMMON[:60])
        batcher.run()
        cache.clear()
        assert (one.finish_reason, len(one.tokens)) == ("length", 8)
        with cache.acquire([*COMMON[:60], 77]) as lease:
            assert lease.cached == 60
        with pytest.raises(UsageError, match="only"):
            cache.pin("other", [77, 78, 79])
