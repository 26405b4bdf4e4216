"""Test the guarantees of a lease of a prefix cache, for each manager."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import prefix_kit
import pytest
import runtime_kit as kit
from fakes.simulated import ALL
from prefix_kit import serve

from pyllamakv.binding.protocol import Capability, MemoryType
from pyllamakv.cache import allocation
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.lease import LOOKAHEAD_TOKENS
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    Busy,
    Cancelled,
    KVCacheFull,
    NoKVSlot,
    PagingError,
    StateError,
    Unsupported,
)
from pyllamakv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyllamakv.runtime.context import Context


def test_room_is_reserved_ahead_without_eviction(tmp_path: Path) -> None:
    """Token by token, the cells are checked only sometimes, and nothing is evicted."""
    cache = PrefixCache(kit.context(tmp_path, n_ctx=256), paging=0)
    serve(cache, [9] * 100)
    with cache.acquire([1, 2, 3]) as lease:
        lease.prefill()
        lease.make_room(1)
        assert lease.granted == 3 + 1 + LOOKAHEAD_TOKENS
        assert cache.stats().resident == 1
        lease.sequence.prefill([4] * 60)
        for _ in range(100):
            lease.make_room(1)
            lease.sequence.step(5)
        assert cache.stats().evicted_tokens == 100 - 64  # a part was evicted
        assert lease.reserved >= 0
    cache.check()


@pytest.mark.parametrize("cached", [0, 40])
def test_the_last_free_cells_are_granted_at_once(tmp_path: Path, cached: int) -> None:
    """Near the end of the cache, a lease gets the free cells; no branch is evicted for more."""
    cache = PrefixCache(kit.context(tmp_path, n_ctx=256))
    if cached:
        serve(cache, [9] * cached)
    with cache.acquire([4] * 200) as lease:
        lease.prefill()
        lease.make_room(1)
        assert lease.granted == 256 - cached
        assert cache.stats().resident == (cached > 0)
        for _ in range(56 - cached):
            lease.make_room(1)
            lease.sequence.step(5)
        assert cache.stats().resident == (cached > 0)
    cache.check()


def test_cells_are_not_read_while_a_lease_certainly_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one lease count once, and those that two leases decoded twice."""
    native = {"capabilities": ALL | Capability.DEFRAG_OPTIONS}
    cache = PrefixCache(kit.context(tmp_path, native, n_ctx=256))
    with cache.acquire([4] * 180) as one:
        one.prefill()
        with monkeypatch.context() as patch:
            patch.delattr(allocation, "cell_stats")
            one.make_room(1)
        assert one.granted == 180 + 1 + LOOKAHEAD_TOKENS
    cache.clear()
    with cache.acquire([4] * 100) as one, cache.acquire([4] * 100) as two:
        one.prefill()
        two.prefill()
        cache.sync()
        assert one.node is two.node
        assert cache.context.kv.stats.used == 200
        assert not cache.allocator.certainly_fits(57, one)
    cache.check()


def test_leases_do_not_take_reserved_cells_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the end of the cache, they share the free cells: not every token reads the cells."""
    cache = PrefixCache(kit.context(tmp_path, n_ctx=256))
    reads: list[int] = []
    real = allocation.cell_stats

    def read(context: Context) -> Any:
        reads.append(1)
        return real(context)

    with cache.acquire([1] * 80) as one, cache.acquire([2] * 80) as two:
        one.prefill()
        two.prefill()
        monkeypatch.setattr(allocation, "cell_stats", kit.ours(read))
        for _ in range(48):
            for lease in (one, two):
                lease.make_room(1)
                lease.sequence.step(5)
        assert len(reads) < 48
        with pytest.raises(KVCacheFull):
            one.make_room(1)
    cache.check()


def test_unused_reserved_cells_are_released_for_another_lease(tmp_path: Path) -> None:
    """Take cells that another lease never used, and none that it did."""
    cache = PrefixCache(kit.context(tmp_path, n_ctx=128))
    one = cache.acquire([1, 2, 3])
    one.prefill()
    one.make_room(1)
    assert one.granted == 3 + 1 + LOOKAHEAD_TOKENS
    with cache.acquire([4] * 124) as two:
        assert one.granted == 4
        two.prefill()
        one.sequence.step(5)
        with pytest.raises(KVCacheFull):
            one.make_room(1)
    one.make_room(60)
    one.release()
    cache.check()


def test_reserved_cells_are_not_granted_twice(tmp_path: Path) -> None:
    """Grant cells to two leases, and refuse those that only one could have."""
    cache = PrefixCache(kit.context(tmp_path, n_ctx=64))
    one, two = cache.acquire([1] * 20), cache.acquire([2] * 20)
    one.make_room(40)  # 20 of the prompt, and as many more, counted from the decoded ones
    with pytest.raises(KVCacheFull):
        two.make_room(30)
    one.prefill()
    two.prefill()
    one.sequence.prefill([3] * 20)
    assert cache.context.kv.stats.used == 60
    one.release()
    two.make_room(30)
    two.release()
    cache.check()


def test_a_lease_has_a_state(tmp_path: Path) -> None:
    """A lease can be released once; its state is readable."""
    cache = PrefixCache(kit.context(tmp_path))
    lease = cache.acquire([1, 2, 3])
    assert (lease.rest, lease.cached, lease.released) == ([1, 2, 3], 0, False)
    assert "0 cached, 3 to decode" in repr(lease)
    lease.release()
    assert lease.released
    assert "released" in repr(lease)
    lease.release()
    assert (cache.stats().nodes, cache.context.kv.stats.used) == (0, 0)


def test_a_prefill_begins_again_where_the_sequence_was_emptied(tmp_path: Path) -> None:
    """If the memory cannot roll back, an abort empties it; the whole prompt is decoded again."""
    cache = PrefixCache(kit.context(tmp_path))
    serve(cache, [3, 4, 5, 6])
    with cache.acquire([3, 4, 5, 6, 7, 8]) as lease:
        assert lease.cached == 4
        lease.sequence.remove()
        lease.prefill()
        assert lease.sequence.tokens == [3, 4, 5, 6, 7, 8]
    cache.check()


def test_a_prompt_whose_state_cannot_be_restored_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window without free cells refuses a state, when a prompt is acquired and at its prefill."""
    ctx = states(tmp_path)
    cache = PrefixCache(ctx, paging="memory")
    serve(cache, [3, 4, 5, 6])
    cache.page_out([3, 4, 5, 6])

    def refused(self: Sequence, saved: bytes) -> None:
        raise StateError("the state has no free cells")

    monkeypatch.setattr(Sequence, "restore", kit.ours(refused))
    with cache.acquire([3, 4, 5, 6, 7]) as lease:
        lease.prefill()
        assert (lease.cached, lease.sequence.tokens) == (0, [3, 4, 5, 6, 7])
    cache.check()


@pytest.mark.parametrize(
    "make",
    [lambda ctx: PrefixCache(ctx, entries=2, paging=0), lambda ctx: SlotCache(ctx, n_slots=2)],
)
def test_prefixes_that_a_cancel_emptied_are_not_reused_after_other_decodes(
    tmp_path: Path, make: Callable[[Context], PrefixCache | SlotCache]
) -> None:
    """A later failure that empties nothing does not hide that others were emptied."""
    ctx = states(tmp_path)
    manager = make(ctx)
    with manager.acquire([3, 4, 5, 6]) as lease:
        lease.sequence.prefill([3, 4, 5, 6])
    other = ctx.sequence()
    ctx.native.fail_next.append(2)
    with pytest.raises(Cancelled):
        other.prefill([7, 8])
    assert ctx.emptied
    ctx.native.fail_next.append(1)
    with pytest.raises(NoKVSlot):
        other.prefill([7, 8])
    assert not ctx.emptied
    with manager.acquire([3, 4, 5, 6, 7]) as lease:
        assert lease.cached == 0
    manager.check()


def test_prompts_competing_for_a_hole_are_both_decoded(tmp_path: Path) -> None:
    """Each finds a hole when it is acquired; at its decode, the hole is fragmented."""
    native = {"capabilities": ALL & ~Capability.DEFRAG_OPTIONS}
    ctx = kit.context(tmp_path, native, n_ctx=64, n_seq_max=8, n_batch=16, n_ubatch=16)
    for at in range(3):
        ctx.sequence(at).prefill([at] * 16)
    ctx.sequence(3).close()
    ctx.native.seq_rm(ctx.handle, 1, -1, -1)
    ctx.ledgers[1].clear()
    cache = PrefixCache(ctx, entries=4)
    leases = [cache.acquire([3 + n] * n) for n in (12, 10, 8)]
    for lease in leases:
        lease.prefill()
        assert lease.sequence.tokens == [3 + len(lease.rest)] * len(lease.rest)
    assert ctx.kv.stats.used == 62
    cache.check()


def states(tmp_path: Path) -> Context:
    """Return a context with the memory of a recurrent model."""
    ctx = kit.context(tmp_path, {"partial": False})
    object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    return ctx


def test_branch_with_an_unsaved_state_keeps_its_sequence(tmp_path: Path) -> None:
    """Only the size of a state is estimated; no sequence is lost if it cannot be saved."""
    ctx = kit.context(tmp_path, {"capabilities": ALL & ~Capability.STATES, "partial": False})
    object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    cache = PrefixCache(ctx)
    with cache.acquire([3, 4, 5, 6]) as lease:
        lease.sequence.prefill([3, 4, 5, 6])
    cache.check()
    assert cache.stats().resident == 1
    with cache.acquire([3, 4, 5, 6, 7]) as lease:
        assert lease.cached == 4
    cache.check()


def recurrent(folder: Path, **options: Any) -> PrefixCache:
    """Return a cache whose memory cannot roll back."""
    ctx = kit.context(folder, {"partial": False}, n_ctx=256)
    object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    return PrefixCache(ctx, **options)


@pytest.mark.parametrize("error", [StateError("no"), Unsupported("no"), MemoryError("no")])
@pytest.mark.parametrize("paging", [None, "memory"])
def test_a_state_that_cannot_be_kept_fails_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paging: str | None, error: Exception
) -> None:
    """It is decoded anyway, and the cache has no partial state."""
    cache = recurrent(tmp_path, paging=paging)
    leases = [cache.acquire([each] * 4) for each in (5, 6, 7)] if paging else []
    with cache.acquire([1, 2, 3, 4]) as lease:

        def failing(*_: object) -> None:
            raise error

        for name in ("save", "fork"):
            monkeypatch.setattr(type(lease.sequence), name, failing)
        lease.prefill()
        assert lease.sequence.tokens == [1, 2, 3, 4]
        monkeypatch.undo()
    assert cache.stats().resident == 1
    for each in leases:
        each.release()
    cache.check()
    assert serve(cache, [1, 2, 3, 4, 5]) == 4


def test_a_checkpoint_evicts_no_other_state(tmp_path: Path) -> None:
    """A long prompt saves states while sequences are vacant, and evicts no other."""
    cache = recurrent(tmp_path, checkpoints=CheckpointSchedule(interval=4, first=0))
    for number in (5, 6):
        with cache.acquire([number]) as lease:
            lease.prefill()
    serve(cache, [*range(10, 30)])
    assert cache.stats().evictions == 0
    assert [serve(cache, [number, 9]) for number in (5, 6)] == [1, 1]


@pytest.mark.regression(
    "two threads in one prefix cache damaged its tree, which then raised AttributeError",
    by="hostile input",
    of="Python",
)
def test_a_second_thread_is_refused_during_an_operation(tmp_path: Path) -> None:
    """While a branch is paged out, other threads get Busy, and nothing changes."""
    cache = prefix_kit.make(tmp_path, paging="memory", n_seq_max=3)
    first, second = [1] * 20, [2] * 20
    prefix_kit.serve(cache, first)
    prefix_kit.serve(cache, second)
    lease = cache.acquire([3] * 20)
    lease.prefill()
    native, entered, leave = cache.context.native, threading.Event(), threading.Event()
    real = native.state_save

    def save(*arguments: Any) -> bytes:
        if threading.current_thread() is thread:
            entered.set()
            leave.wait()
        return real(*arguments)

    native.state_save = save
    thread = threading.Thread(target=cache.page_out, args=(first,))
    thread.start()
    entered.wait()
    try:
        before = [(node.key, node.entry, node.page) for node in cache.branches.tree.walk()]
        for act in (
            lambda: cache.acquire([*second, 4]),
            lambda: cache.pin("second", second),
            lambda: cache.page_out(second),
            cache.evict,
            cache.sync,
            cache.relieve,
            lambda: lease.make_room(100),
            lease.park,
            lease.release,
            cache.close,
        ):
            with pytest.raises(Busy):
                act()
        assert [(node.key, node.entry, node.page) for node in cache.branches.tree.walk()] == before
    finally:
        leave.set()
        thread.join()
    lease.release()
    cache.check()
    assert (cache.stats().paged, cache.stats().leased, cache.pins) == (1, 0, {})
    for prompt in (first, second, [3] * 20):
        assert prefix_kit.serve(cache, [*prompt, 4]) == 20


def test_late_refusal_of_a_prompt_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence was found before; the prefix stays cached."""
    cache = prefix_kit.make(tmp_path)
    prefix_kit.serve(cache, prefix_kit.SYSTEM)
    enforce = PrefixCache.enforce

    def refuse(self: PrefixCache, tokens: int) -> None:
        if tokens:
            raise PagingError("no space")
        enforce(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "enforce", refuse)
        with pytest.raises(PagingError, match="no space"):
            cache.acquire([*prefix_kit.SYSTEM, 5])
    assert cache.leases == []
    cache.check()
    assert prefix_kit.serve(cache, [*prefix_kit.SYSTEM, 5]) == 20
