"""Test slots and their leases, with a simulated library whose logits show lost tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import adapter_kit
import numpy as np
import pytest
import runtime_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from slots_kit import fill, fresh

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    Cancelled,
    Closed,
    KVCacheFull,
    NoKVSlot,
    NoSlotAvailable,
    Unsupported,
    UsageError,
)
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.kv import KV

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.slot_cache import SlotLease


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 64 cells and 4 sequences."""
    return kit.context(tmp_path)


@pytest.mark.parametrize("policy", ["longest", "best"])
@pytest.mark.parametrize(
    ("kept", "prompt", "cached"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [4, 5, 6], 0),
        ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        ([], [1, 2], 0),
    ],
    ids=["extended", "repeated", "new", "shorter", "empty"],
)
def test_loaded_prompt_leaves_one_token_to_evaluate(
    ctx: Context, policy: Any, kept: list, prompt: list, cached: int
) -> None:
    """The known part of a prompt is kept, and at least one token is evaluated."""
    cache = SlotCache(ctx, 1, policy)
    if kept:
        fill(cache, kept)
    lease = cache.acquire(prompt)
    assert (lease.cached, lease.rest) == (cached, prompt[cached:])
    assert lease.sequence.tokens == prompt[:cached]
    lease.decode()
    assert lease.sequence.tokens == prompt
    cache.check()


@pytest.mark.parametrize("policy", ["longest", "best"])
def test_acquire_fails_if_all_slots_are_in_use(ctx: Context, policy: Any) -> None:
    """Ollama's "best" dereferenced nil here; nothing changes, and a release helps."""
    cache = SlotCache(ctx, 2, policy)
    leases = [cache.acquire([1, 2]), cache.acquire([1, 3])]
    with pytest.raises(NoSlotAvailable) as caught:
        cache.acquire([1, 2, 3])
    assert caught.value.slots == 2
    assert cache.stats().refused == 1
    leases[0].release()
    leases[0].release()
    assert cache.acquire([1, 2, 3]).cached == 0
    assert cache.stats().in_use == 2


def test_bad_prompts_are_refused(ctx: Context) -> None:
    """Empty (a panic in ollama), too long, and invalid tokens."""
    cache = SlotCache(ctx)
    for wrong in ([], range(17), ["a"], [1.5], [[1]]):
        with pytest.raises(UsageError):
            cache.acquire(wrong)
    with pytest.raises(UsageError, match="at most 15 fit"):
        cache.acquire(range(16), groups=[(0, 16)])
    assert cache.stats().prompts == 0
    assert cache.acquire(cache.truncate(range(20))).rest == list(range(4, 20))


@pytest.mark.parametrize(
    ("n_streams", "n", "size"), [(1, 4, 16), (1, 2, 32), (4, 2, 16), (-1, 2, 16), (0, 2, 32)]
)
def test_slots_divide_the_cells_of_the_context(
    tmp_path: Path, n_streams: int, n: int, size: int
) -> None:
    """The context decides how cells are divided; the limit is that of a sequence."""
    made = kit.model(tmp_path).context(n_ctx=64, n_batch=32, n_seq_max=4)
    made.native.context_info = lambda _: replace(made.info, n_streams=n_streams)
    ctx = Context(made.model, made.handle, made.params)
    with SlotCache(ctx, n_slots=n) as cache:
        assert (cache.size, cache.overcommits) == (size, ctx.partitions == 1 and n < 4)


def test_invalid_slot_cache_options_are_refused(ctx: Context) -> None:
    """Unknown slots, sizes that do not fit, an unknown policy."""
    for options in ({"n_slots": 0}, {"n_slots": 5}, {"size": 65}, {"size": 1}, {"policy": "x"}):
        with pytest.raises(UsageError):
            SlotCache(ctx, **options)
    taken = ctx.sequence()
    with pytest.raises(UsageError, match="in use"):
        SlotCache(ctx)
    taken.close()
    assert SlotCache(ctx).size == 16


def test_best_policy_forks_from_a_slot_in_use(tmp_path: Path, ctx: Context) -> None:
    """A shared prefix is stored once, and both sequences continue as if alone."""
    cache = SlotCache(ctx)
    first = cache.acquire([1, 2, 3, 4, 5])
    first.decode()
    second = cache.acquire([1, 2, 3, 9, 9])
    assert (second.cached, second.sequence.tokens) == (3, [1, 2, 3])
    second.decode()
    assert ctx.kv.stats.used == 7
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, [1, 2, 3, 9, 9]))
    first.decode([6])
    assert np.array_equal(ctx.logits().copy(), fresh(tmp_path, [1, 2, 3, 4, 5, 6]))
    assert cache.stats().forks == 1
    cache.check()


def test_no_history_is_evicted_while_a_slot_is_empty(ctx: Context) -> None:
    """With two alternating conversations, ollama's "longest" evicts the first one."""
    cache = SlotCache(ctx, policy="longest")
    one, other = [1, 5, 6, 7, 8], [1, 9, 9, 9, 9]
    assert fill(cache, one) != fill(cache, other)
    assert cache.acquire([*one, 2]).cached == 5
    assert cache.acquire([*other, 2]).cached == 5
    assert cache.stats().evictions == 0


def test_least_recently_used_history_is_evicted(ctx: Context) -> None:
    """A slot's age counts from its release."""
    cache = SlotCache(ctx, 2)
    fill(cache, [1, 1])
    fill(cache, [2, 2])
    fill(cache, [1, 1, 1])
    fill(cache, [3, 3])
    assert [slot.tokens for slot in cache._slots] == [[1, 1, 1], [3, 3]]
    assert cache.stats().evictions == 1


def test_tokens_are_recorded_after_their_decode(ctx: Context) -> None:
    """A failed decode does not change the slot; ollama recorded tokens first (#7767)."""
    cache = SlotCache(ctx, 1)
    lease = cache.acquire(range(40, 60))
    ctx.native.fail_next = [1]
    with pytest.raises(NoKVSlot):
        lease.decode()
    assert lease.sequence.tokens == []
    ctx.native.fail_next = [0, 2]
    with pytest.raises(Cancelled):
        ctx.decode([lease.sequence.feed(range(40, 44))])
        ctx.decode([lease.sequence.feed(range(44, 48))])
    lease.release()
    ctx.native.fail_next = []
    # The ledger has only the tokens that the failing library reports as decoded.
    assert cache.acquire(range(40, 60)).cached == 4


def test_cancelled_prompt_keeps_its_decoded_tokens(ctx: Context) -> None:
    """Decoded tokens stay usable, for the same lease and for the next one."""
    cache = SlotCache(ctx, 1)
    prompt = list(range(3, 53))
    lease = cache.acquire(prompt)
    ctx.decode(lease.sequence.feed(lease.rest[:32], "none"))
    ctx.native.cancel_after(ctx.handle, 0)
    with pytest.raises(Cancelled):
        lease.decode()
    ctx.native.cancel_after(ctx.handle, -1)
    assert lease.sequence.tokens == prompt[:32]
    lease.decode()
    assert lease.sequence.tokens == prompt
    with pytest.raises(UsageError, match="no tokens to decode"):
        lease.decode()
    cache.check()


@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.HYBRID])
@pytest.mark.parametrize("policy", ["best", "longest"])
def test_cached_length_is_that_of_the_next_lease(
    tmp_path: Path, memory: MemoryType, policy: Any
) -> None:
    """It depends on salt and groups, changes nothing, and is 0 while all slots are in use."""
    ctx = kit.context(tmp_path, {"partial": memory is MemoryType.ATTENTION}, n_ctx=256)
    object.__setattr__(ctx.info, "memory", memory)
    cache = SlotCache(ctx, 2, policy=policy)
    text = [3 + (7 * i * i + i) % 250 for i in range(40)]
    prompts: list[tuple[list[int], dict[str, Any]]] = [
        (text, {}), (text[:30], {}), ([*text[:30], 9], {}), ([*text[:35], 8], {"salt": "a"}),
        ([*text[:35], 7], {"salt": "a"}), ([*text[:20], 6], {"groups": [(15, 21)]}), (text, {}),
    ]  # fmt: skip
    found = []
    for prompt, options in prompts:
        before, clock = cache.dump(), cache.branches.tree.clock
        found.append(cache.cached_length(prompt, **options))
        assert (cache.dump(), cache.branches.tree.clock) == (before, clock)
        with cache.acquire(prompt, **options) as lease:
            assert lease.cached == found[-1]
            lease.decode()
    assert found[0] == found[3] == 0 < found[2]
    with cache.acquire(text), cache.acquire([5]):
        assert cache.cached_length(text) == 0
    with pytest.raises(UsageError, match="the prompt is empty"):
        cache.cached_length([])


def test_larger_slots_evict_the_oldest_free_history(ctx: Context) -> None:
    """The oldest free history is evicted, and never one in use."""
    cache = SlotCache(ctx, 4, size=40)
    assert cache.overcommits
    fill(cache, [5] * 20)
    fill(cache, [6] * 20)
    first = cache.acquire([7] * 30)
    first.decode()
    assert [len(slot.tokens) for slot in cache._slots] == [0, 20, 30, 0]
    second = cache.acquire([8] * 40)
    with pytest.raises(KVCacheFull) as caught:
        second.make_room(40)
    assert (caught.value.cells, caught.value.used, caught.value.wanted) == (64, 50, 40)
    # Nothing was evicted for cells that could not be freed.
    assert [len(slot.tokens) for slot in cache._slots] == [0, 20, 30, 0]
    second.make_room(30)
    assert [len(slot.tokens) for slot in cache._slots] == [0, 0, 30, 0]
    assert cache.stats().evictions == 2
    cache.check()


def test_shared_cells_are_counted_once(ctx: Context) -> None:
    """Four conversations of 40 with 32 tokens in common fit into 64 cells."""
    cache = SlotCache(ctx, 4, size=60)
    leases = []
    for n in range(4):
        leases.append(cache.acquire([*range(20, 52), *[60 + n] * 8]))
        leases[-1].decode()
    assert ctx.kv.stats.used == 32 + 4 * 8
    assert cache.stats().tokens == 160
    cache.check()


def test_lease_with_a_closed_or_gapped_sequence_is_not_reused(ctx: Context) -> None:
    """A closed sequence is replaced, one with a gap is emptied: neither is a prefix."""
    cache = SlotCache(ctx, 2)
    with cache.acquire([1, 2, 3, 4]) as lease:
        lease.decode()
        lease.sequence.close()
    with cache.acquire([1, 2, 3, 4]) as lease:
        assert lease.cached == 0
        lease.decode()
        lease.sequence.remove(1, 3)
    assert cache.acquire([1, 4, 5]).cached == 0
    cache.check()


def test_check_finds_lost_and_unowned_tokens(ctx: Context) -> None:
    """A token outside of the ledger is a ghost, and a lost one is reported as well."""
    cache = SlotCache(ctx, 2)
    fill(cache, [1, 2, 3])
    cache.check()
    ctx.native.seq_rm(ctx.handle, 0, 1, 2)
    with pytest.raises(AssertionError, match="no ledger knows"):
        cache.check()


def test_slot_statistics_and_dump_show_every_slot(
    ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the numbers, the drawing and the log."""
    caplog.set_level(logging.DEBUG, "pyllamakv.cache")
    cache = SlotCache(ctx, 2)
    fill(cache, ctx.model.tokenize("Hello there"))
    fill(cache, ctx.model.tokenize("Hello world"))
    found = cache.stats()
    assert (found.slots, found.in_use, found.size, found.tokens) == (2, 0, 32, 24)
    assert (found.hits, found.misses, found.forks) == (1, 1, 1)
    assert (found.reused_tokens, found.prompt_tokens) == (7, 24)
    assert found.to_json()["prompts"] == 2
    lease = cache.acquire([9])
    assert lease.sequence.id == 0
    first, second = cache.dump().splitlines()
    assert first.startswith("slot 0: sequence 0, in use, 0 of 32 tokens")
    assert "free, 12 of 32 tokens" in second
    assert "Hello world" in second
    assert "prompt of 12 tokens: 7 in slot 1, from slot 0" in caplog.text
    assert "SlotCache" in repr(cache)
    assert "sequence 0" in repr(lease)


def test_close_releases_all_sequences(ctx: Context) -> None:
    """Leases of a closed cache release without an error, and no prompt is accepted."""
    with SlotCache(ctx, 4) as cache:
        lease = cache.acquire([1, 2])
        lease.decode()
    cache.close()
    lease.release()
    assert ctx.kv.stats.used == 0
    with pytest.raises(Closed):
        cache.acquire([1])
    assert SlotCache(ctx, 4).stats().tokens == 0


def released(lease: SlotLease) -> bool:
    return lease.released


def test_lease_is_released_after_an_exception(ctx: Context) -> None:
    """An exception that leaves the block releases the slot."""
    cache = SlotCache(ctx, 1)
    with pytest.raises(ZeroDivisionError), cache.acquire([1]) as lease:
        raise ZeroDivisionError
    assert released(lease)
    assert cache.stats().in_use == 0


def expected_row(tokens: list[int]) -> np.ndarray:
    """Return the logits of the simulated library for a sequence of these tokens."""
    total = sum(token * (pos + 7) for pos, token in enumerate(tokens))
    row = np.zeros(259, dtype=np.float32)
    row[3 + (32 + total % 90)] = 5.0
    row[3 + (32 + (total * 7 + 1) % 90)] += 4.0
    return row


@pytest.mark.parametrize("heals", [True, False])
def test_scattered_cells_are_moved_together(
    ctx: Context, heals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unpatched build defragments once; one that cannot reports the free cells."""

    def refuse(self: KV, **_: Any) -> None:
        raise Unsupported("no defragmentation here", "DEFRAG")

    if not heals:
        monkeypatch.setattr(KV, "defrag", refuse)
    cache = SlotCache(ctx)
    leases = [cache.acquire([60 + n]) for n in range(4)]
    for token in range(16):
        for each in leases:
            each.sequence.step(60 + token)
    leases[0].release()
    lease = cache.acquire(range(20, 30))
    if heals:
        lease.decode()
        assert lease.sequence.tokens == list(range(20, 30))
    else:
        with pytest.raises(KVCacheFull) as caught:
            lease.decode()
        found = caught.value
        assert (found.cause, found.used, found.largest_hole) == ("fragmented", 48, 1)
        assert not found.defragged
    cache.check()


words = st.lists(st.integers(3, 6), min_size=1, max_size=14)


natives = st.sampled_from([{}, {"can_shift": False}, {"partial": False}, {"contiguous": False}])


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), natives, st.sampled_from(["longest", "best"]), st.booleans())
def test_random_traffic_keeps_logits_and_cells(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    native: dict[str, Any],
    policy: Any,
    lends: bool,
) -> None:
    """Logits are those of the sequence's own tokens, and no cell is lost."""
    ctx = kit.context(tmp_path_factory.getbasetemp(), {"heals": True, **native}, n_ctx=48)
    cache = SlotCache(ctx, 3, policy, keep=data.draw(st.integers(0, 3)), size=16 + 8 * lends)
    leases: list[SlotLease] = []
    histories: list[list[int]] = [[3, 4, 5]]
    for _ in range(data.draw(st.integers(1, 14))):
        kind = data.draw(st.sampled_from(["new", "new", "more", "more", "release"]))
        if kind == "new":
            begin = data.draw(st.sampled_from(histories))
            tokens = [*begin[: data.draw(st.integers(0, 14))], *data.draw(words)]
            tokens = cache.truncate(tokens)
            if len(leases) == 3:
                with pytest.raises(NoSlotAvailable):
                    cache.acquire(tokens)
                continue
            lease = cache.acquire(tokens)
            assert lease.cached < len(tokens)
            assert lease.sequence.tokens == tokens[: lease.cached]
            leases.append(lease)
            expected, more = tokens, None
        elif leases:
            lease = data.draw(st.sampled_from(leases))
            if kind == "release":
                lease.release()
                leases.remove(lease)
                cache.check()
                continue
            more = data.draw(words)[:5]
            expected = []
        else:
            continue
        before = lease.sequence.tokens
        try:
            lease.decode(more)
        except KVCacheFull:
            # Cells of others, or a prompt that kept its whole slot.
            assert lends or lease.keep + len(more or ()) > cache.size
            cache.check()
            continue
        now = lease.sequence.tokens
        histories.append(now)
        if more is None:
            assert now == expected
        else:
            kept = now[: -len(more)]
            assert now[-len(more) :] == more
            assert (
                kept == before
                or kept == before[: lease.keep] + before[len(before) - len(kept) + lease.keep :]
            )
        assert np.array_equal(ctx.logits().copy(), expected_row(now))
        cache.check()


def test_a_change_of_adapters_empties_the_slots(tmp_path: Path) -> None:
    """States are dropped too; it is refused while a slot is leased or parked."""
    context, adapter = adapter_kit.simulated(tmp_path)
    prompt = list(range(10, 40))
    cache = SlotCache(context)
    with cache.acquire(prompt) as lease:
        lease.decode()
        with pytest.raises(UsageError, match="leases"):
            context.set_adapters({adapter: 1.0})
        parked = lease.park()
    with pytest.raises(UsageError, match="parked"):
        context.set_adapters({adapter: 1.0})
    parked.close()
    context.set_adapters({adapter: 1.0})
    assert cache.stats().evicted_tokens == 30
    with cache.acquire(prompt) as lease:
        assert lease.cached == 0
        lease.decode()
        assert context.kv.stats.used == 30
    with cache.acquire(prompt) as lease:
        assert lease.cached == 29
    cache.check()
    cache.close()
    context.set_adapters({})


def test_tokens_after_a_shift_are_not_reused(tmp_path: Path) -> None:
    """They were evaluated after tokens that were discarded since."""
    cache = SlotCache(kit.context(tmp_path), 1, size=16, keep=4)
    with cache.acquire(list(range(10, 24))) as lease:
        lease.decode()
        lease.decode([5, 6, 7, 8])
        tokens = list(lease.sequence.tokens)
    assert cache.stats().shifts == 1
    assert tokens[:4] == [10, 11, 12, 13]
    with cache.acquire([*tokens, 9]) as lease:
        assert lease.cached in (0, 4)
    cache.check()
