"""Test where states are due, which ones are evicted, and managers without states."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import prefix_kit
import pytest
import runtime_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.lease import LOOKAHEAD_TOKENS
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.prefix_states import StatePoints, checked_schedule
from pyllamakv.cache.radix_tree import NO_SALT, key_to_tokens, tokens_to_key
from pyllamakv.cache.residency import States, StateTooLarge
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import BudgetTooSmall, Cancelled, PagingError, StateError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context

OFTEN = CheckpointSchedule(size=100, interval=16, first=1)


def recurrent(folder: Path, **options: Any) -> Context:
    """Return a context of 512 cells whose memory has one state per sequence."""
    options = {"n_ctx": 512, "n_seq_max": 4, **options}
    ctx = kit.context(folder, {"partial": False}, **options)
    object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    return ctx


def stops(points: StatePoints, end: int, n: int = 1 << 20) -> list[int]:
    """Return the lengths at which a decode up to ``end`` stops for a state."""
    found, here = [], 0
    while here < end:
        here += points.limit(here, min(n, end - here))
        if points.due(here):
            found.append(here)
    return found


# Where a state is due...


def test_states_are_due_at_intervals_branches_and_named_positions() -> None:
    """The second last token of the prompt has one, and later text at the interval."""
    points = StatePoints(OFTEN, 40, 0, branches=(21, 40, 55), named=(0, 5, 40))
    assert stops(points, 40) == [5, 16, 21, 32, 39]
    assert not points.due(55)
    assert points.due(56)
    assert not points.due(57)
    assert points.due(72)


def test_no_state_is_due_in_the_cached_part_or_before_the_first() -> None:
    """A named position counts although it is short."""
    schedule = CheckpointSchedule(interval=8, first=20)
    assert stops(StatePoints(schedule, 40, 0, named=[3]), 40) == [3, 24, 32, 39]
    points = StatePoints(schedule, 40, 30)
    assert points.limit(30, 10) == 2
    assert not points.due(30)
    assert points.due(32)


def test_states_are_not_stored_inside_token_groups() -> None:
    """A prompt could not continue there, because its group would be split."""
    points = StatePoints(
        OFTEN, 40, 0, branches=[21], named=[6], groups=[(4, 8), (20, 24), (36, 40)]
    )
    assert stops(points, 40) == [4, 16, 20, 32, 36]


def test_state_position_ahead_can_be_added() -> None:
    """Another prompt that diverges there was submitted in the meantime."""
    points = StatePoints(CheckpointSchedule(interval=100, first=1), 40, 0)
    points.add(25, 10)
    points.add(25, 10)
    points.add(9, 10)
    points.add(40, 10)
    assert stops(points, 40) == [25, 39]
    points = StatePoints(CheckpointSchedule(interval=100, first=1), 40, 0)
    assert points.due(39)
    points.add(20, 39)
    assert points.limit(39, 1) == 1
    assert not points.due(40)


def test_an_added_position_is_checked_as_others_are() -> None:
    """It is in no group, and the first prefix with a state has the length of the schedule."""
    schedule = CheckpointSchedule(interval=100, first=8)
    points = StatePoints(schedule, 40, 0, groups=[(10, 20)])
    for each in (7, 8, 15, 20):
        points.add(each, 0)
    assert stops(points, 40) == [8, 10, 20, 39]
    points = StatePoints(schedule, 40, 0, groups=[(10, 20)])
    points.add(15, 10)
    assert stops(points, 40) == [39]


def test_a_state_inside_of_a_group_is_not_used(tmp_path: Path) -> None:
    """The prompt continues after an earlier state, and without the group after the last one."""
    cache = PrefixCache(recurrent(tmp_path), checkpoints=OFTEN)
    tokens = list(range(10, 30))
    prefix_kit.serve(cache, tokens)
    with cache.acquire([*tokens, 5], groups=[(18, 21)]) as lease:
        assert lease.cached == 16
    with cache.acquire([*tokens, 5]) as lease:
        assert lease.cached == 20


@given(
    st.integers(1, 60), st.integers(0, 59), st.integers(1, 20), st.integers(1, 30),
    st.lists(st.integers(0, 70)),
)  # fmt: skip
def test_every_batch_size_reaches_every_position(
    prompt: int, cached: int, interval: int, n: int, branches: list[int]
) -> None:
    """Batches of any size stop at the same positions, each inside of the uncached prompt."""
    cached = min(cached, prompt - 1)
    schedule = CheckpointSchedule(interval=interval, first=0)
    one = StatePoints(schedule, prompt, cached, branches=branches)
    other = StatePoints(schedule, prompt, cached, branches=branches)
    found = stops(one, prompt, n)
    assert found == stops(other, prompt)
    assert all(cached < each < prompt for each in found)
    assert {each for each in branches if cached < each < prompt} <= set(found)


# Kept states...


class Store:
    """Saved states of prefixes, and the number of evicted ones."""

    def __init__(self, ctx: Context, *, size: int = 100, budget: int = 1 << 20) -> None:
        schedule = CheckpointSchedule(size=size, interval=1, first=0, budget=budget)
        self.residency = States(ctx, 4, None, schedule)
        self.tree, self.tier = self.residency.tree, self.residency.tier
        self.evictions = 0

    def put(self, key: bytes, saved: bytes) -> None:
        """Save a state after the tokens of a key."""
        ledger = SimpleNamespace(tokens=key_to_tokens(key))
        sequence: Any = SimpleNamespace(ledger=ledger, save=lambda *, portable: saved)
        with suppress(StateTooLarge):
            self.evictions += self.residency.save_prefix(sequence, NO_SALT)

    def best(self, key: bytes, groups: Any = ()) -> tuple[int, bytes]:
        """Return the length and the content of the longest state."""
        node = self.residency.longest_state(key, NO_SALT, groups)
        return node.end, node.page.read() if node.end else b""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Return a context that no test changes."""
    return recurrent(tmp_path_factory.mktemp("empty"))


def store(ctx: Context, *keys: tuple[int, int], **limits: int) -> Store:
    """Return a store with states: their length, and their bytes."""
    made = Store(ctx, **limits)
    for length, n_bytes in keys:
        made.put(tokens_to_key(range(length)), b"x" * n_bytes)
    return made


def lengths(kept: Store) -> list[int]:
    """Return the lengths of the prefixes that have a state."""
    return sorted(node.end for node in kept.tree.walk() if node.page is not None)


def test_the_longest_state_of_a_prefix_is_found(empty: Context) -> None:
    """None is longer than the common prefix, and none splits a group."""
    kept = store(empty, (10, 5), (20, 7), (30, 9))
    key = tokens_to_key([*range(25), 99])
    assert kept.best(key) == (20, b"x" * 7)
    assert kept.best(key, [(15, 22)]) == (10, b"x" * 5)
    assert kept.best(tokens_to_key(range(9))) == (0, b"")
    assert kept.best(tokens_to_key(range(20))) == (20, b"x" * 7)
    assert kept.best(tokens_to_key(range(21))) == (20, b"x" * 7)
    assert kept.residency.diverging(key, NO_SALT, []) == {25}
    kept.put(tokens_to_key([*range(15), 99]), b"y")
    assert kept.residency.diverging(key, NO_SALT, []) == {15, 25}
    kept.tree.check()


def test_the_state_that_saves_the_fewest_tokens_per_byte_is_evicted(empty: Context) -> None:
    """With the same age: 10 tokens in 100 bytes before 10 in 10, and before 100 in 200."""
    kept = store(empty, (100, 200), (110, 100), (120, 10), budget=309)
    assert lengths(kept) == [100, 120]
    assert (kept.evictions, kept.residency.evicted_tokens) == (1, 110)
    kept.tree.check()


def test_state_with_fewest_tokens_per_byte_is_evicted_first(empty: Context) -> None:
    """20 tokens in 190 bytes go before 10 in 10, although they were used later."""
    kept = store(empty, budget=200)
    for first, length, n_bytes in ((1, 10, 10), (2, 20, 190), (3, 10, 10)):
        kept.put(tokens_to_key([first] * length), b"x" * n_bytes)
    assert [kept.best(tokens_to_key([n] * 30))[0] for n in (1, 2, 3)] == [10, 0, 10]


def test_recently_used_state_is_kept(empty: Context) -> None:
    """Of two with equal value, the last used one is kept; unused value decays with age."""
    kept = store(empty, size=2)
    for first in (1, 2):
        kept.put(tokens_to_key([first] * 10), b"x" * 10)
    kept.best(tokens_to_key([1] * 11))
    kept.put(tokens_to_key([3] * 10), b"x" * 10)
    assert kept.best(tokens_to_key([1] * 11))[0] == 10
    assert kept.best(tokens_to_key([2] * 11))[0] == 0
    for _ in range(50):  # short states in use outlive a long unused one
        kept.best(tokens_to_key([1] * 11))
    kept.put(tokens_to_key([4] * 100), b"x" * 100)
    for _ in range(50):
        kept.best(tokens_to_key([1] * 11))
    kept.put(tokens_to_key([5] * 10), b"x" * 10)
    assert kept.best(tokens_to_key([4] * 101))[0] == 0


def test_a_state_above_the_budget_is_not_stored(empty: Context) -> None:
    """Nothing is evicted for it."""
    kept = store(empty, (10, 5), (20, 101), budget=100)
    assert lengths(kept) == [10]
    assert kept.evictions == 0
    assert lengths(store(empty, (10, 5), size=0)) == []


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), max_size=40))
def test_a_store_keeps_its_limits(empty: Context, puts: list[tuple[int, int]]) -> None:
    """Bytes and number stay within the schedule, and the tree is valid."""
    kept = store(empty, size=4, budget=60)
    for length, n_bytes in puts:
        kept.put(tokens_to_key([n % 3 for n in range(length)]), b"x" * n_bytes)
        kept.tree.check()
        pages = [node.page for node in kept.tree.walk() if node.page is not None]
        assert len(pages) == kept.tier.count <= 4
        assert sum(page.size for page in pages) == kept.tier.size <= 60


# Managers...


def managers() -> list[Any]:
    """Return the constructor of each manager for a memory that cannot roll back."""
    return [
        pytest.param(lambda ctx, **more: PrefixCache(ctx, **more), id="PrefixCache"),
        pytest.param(lambda ctx, **more: SlotCache(ctx, **more), id="SlotCache"),
    ]


def prompts(n: int, common: int, tail: int = 6) -> list[list[int]]:
    """Return prompts with a common prefix that diverge in their next token."""
    system = [10 + i % 40 for i in range(common)]
    return [[*system, 60 + i, *([70] * (tail - 1))] for i in range(n)]


@pytest.mark.parametrize("make", managers())
def test_a_shared_prefix_is_reused_from_its_second_occurrence_after_the_first(
    tmp_path: Path, make: Any
) -> None:
    """The second prompt shows the branch point, for any generated text."""
    ctx = recurrent(tmp_path)
    with make(ctx) as cache, Batcher(cache) as batcher:
        found = []
        for each in prompts(6, 100):
            one = batcher.submit(each, 12)
            batcher.run()
            found.append(one.cached)
            cache.check()
        assert found == [0, 0, 100, 100, 100, 100]


@pytest.mark.parametrize("make", managers())
def test_a_prompt_in_progress_shows_a_branch_point(tmp_path: Path, make: Any) -> None:
    """Two prompts that do not wait are both evaluated; the third finds their prefix."""
    ctx = recurrent(tmp_path)
    with make(ctx) as cache, Batcher(cache, max_defer=0) as batcher:
        both = [batcher.submit(each, 3) for each in prompts(2, 100)]
        batcher.run()
        assert [one.cached for one in both] == [0, 0]
        one = batcher.submit(prompts(3, 100)[2], 3)
        batcher.run()
        assert one.cached == 100


@pytest.mark.parametrize("make", managers())
def test_a_prompt_that_diverges_in_a_group_of_another_delays_no_step(
    tmp_path: Path, make: Any
) -> None:
    """A group is decoded in one batch, so no state is due inside of it."""
    first, second = prompts(2, 30)
    with make(recurrent(tmp_path)) as cache, Batcher(cache) as batcher:
        both = [batcher.submit(first, 2, groups=[(20, 34)]), batcher.submit(second, 2)]
        for _ in range(20):
            batcher.step()
        assert [one.finish_reason for one in both] == ["length", "length"]


@pytest.mark.parametrize("make", managers())
def test_a_named_position_is_reused_the_first_time(tmp_path: Path, make: Any) -> None:
    """The caller names the end of its system prompt."""
    ctx = recurrent(tmp_path)
    first, second = prompts(2, 100)
    with make(ctx) as cache, Batcher(cache) as batcher:
        batcher.submit(first, 1, checkpoints=[100])
        batcher.run()
        assert batcher.submit(second, 1).result() is not None
        with cache.acquire(second[:-1], checkpoints=[3]) as lease:
            assert lease.cached >= 100
        for wrong in ([len(first) + 1], [-1], 3, ["x"]):
            with pytest.raises((UsageError, TypeError)):
                cache.acquire(first, checkpoints=wrong)
            with pytest.raises((UsageError, TypeError)):
                batcher.submit(first, checkpoints=wrong)
        cache.check()


@pytest.mark.parametrize("make", managers())
def test_close_frees_the_host_memory_of_states_and_parked_leases(tmp_path: Path, make: Any) -> None:
    """A manager that is referenced still keeps no bytes of pages."""
    cache = make(recurrent(tmp_path, n_seq_max=1))
    lease = cache.acquire([5] * 20)
    lease.sequence.prefill([5] * 20)
    parked = lease.park()
    with cache.acquire([6] * 20) as lease:
        lease.sequence.prefill([6] * 20)

    def held() -> int:
        sizes = cache.stats().bytes_by_tier
        return sum(sizes[name] for name in sizes if name != "cells")

    assert held() > 0
    cache.close()
    assert held() == 0
    parked.close()
    assert held() == 0


@pytest.mark.parametrize("options", [{"n_ctx": 1024}, {"n_ctx": 1024, "entries": 2}])
def test_text_has_states_at_the_interval(tmp_path: Path, options: dict[str, Any]) -> None:
    """A prompt that diverges inside of a long answer starts near the divergence."""
    ctx = recurrent(tmp_path, n_ctx=options.pop("n_ctx"))
    with PrefixCache(ctx, checkpoints=OFTEN, **options) as cache, Batcher(cache) as batcher:
        one = batcher.submit([5] * 8, 300)
        batcher.run()
        known = [*one.prompt, *one.tokens]
        other = batcher.submit([*known[:200], 99], 1)
        batcher.run()
        # States of text are saved when cells are reserved, which is for several tokens at once.
        assert other.cached is not None
        assert 200 - 16 - LOOKAHEAD_TOKENS <= other.cached < 200
        cache.check()


def test_text_of_a_slot_has_states_at_the_interval(tmp_path: Path) -> None:
    """A slot saves them between two tokens."""
    ctx = recurrent(tmp_path, n_ctx=1024, n_seq_max=2)
    with SlotCache(ctx, checkpoints=OFTEN) as cache, Batcher(cache) as batcher:
        one = batcher.submit([5] * 8, 300)
        batcher.run()
        other = batcher.submit([*one.prompt, *one.tokens[:192], 99], 1)
        batcher.run()
        assert other.cached == 8 + 12 * 16
        cache.check()


@pytest.mark.parametrize("make", managers())
def test_a_budget_below_one_state_keeps_none(tmp_path: Path, make: Any) -> None:
    """Prompts are decoded again; nothing fails, and no token is wrong."""
    ctx = recurrent(tmp_path)
    known = []
    for schedule in (None, CheckpointSchedule(budget=10), CheckpointSchedule(size=0)):
        with make(ctx, checkpoints=schedule) as cache, Batcher(cache) as batcher:
            going = [batcher.submit(each, 8) for each in prompts(6, 100)]
            batcher.run()
            known.append([one.tokens for one in going])
            cache.check()
        ctx.clear()
    assert known[0] == known[1] == known[2]


def test_pages_of_states_stay_within_the_schedule(tmp_path: Path) -> None:
    """The number is limited, and a page above the budget is not written."""
    schedule = CheckpointSchedule(size=3, interval=16, first=1, budget=30_000)
    cache = PrefixCache(recurrent(tmp_path), checkpoints=schedule)
    for each in prompts(8, 60):
        prefix_kit.serve(cache, each)
        assert cache.stats().paged <= 3
        assert cache.stats().paged_bytes <= 30_000
    assert cache.stats().evictions > 0
    with pytest.raises(PagingError, match="budget of checkpoints is 30000"):
        cache.branches.write_page(cache.branches.tier, b"x" * 30_001, 0, 9)
    cache.check()


@pytest.mark.regression(
    "a state that was paged in twice took a second sequence, and the first one was lost",
    by="random_operations",
    of="Python",
)
def test_a_branch_with_a_sequence_and_a_page_is_paged_once(tmp_path: Path) -> None:
    """The page of a state remains in memory when the branch gets a sequence again."""
    prompt = list(range(1, 41))
    with recurrent(tmp_path) as ctx, PrefixCache(ctx, paging="memory") as cache:
        prefix_kit.serve(cache, prompt)
        resident = cache.stats().resident
        for _ in range(2):
            cache.page_out(prompt)
            cache.check()
            assert cache.stats().resident == resident - 1
        for _ in range(2):
            cache.page_in(prompt)
            cache.check()
            assert cache.stats().resident == resident
        cache.page_out(prompt)
        cache.check()
        assert cache.stats().resident == resident - 1


def test_an_evicted_history_leaves_its_state(tmp_path: Path) -> None:
    """A chat continues after its last text although another one used its slot."""
    cache = SlotCache(recurrent(tmp_path), n_slots=1)
    chat = [*range(10, 40)]
    with cache.acquire(chat) as lease:
        lease.decode()
        lease.decode([5] * 20)
    with cache.acquire([3] * 30) as lease:
        lease.decode()
    with cache.acquire([*chat, *([5] * 20), 6]) as lease:
        assert lease.cached == 50
    cache.check()


def test_a_history_that_is_evicted_for_cells_leaves_its_state(tmp_path: Path) -> None:
    """Slots share cells: the text of an answer is reused, although its cells were freed."""
    cache = SlotCache(recurrent(tmp_path, n_ctx=100, n_seq_max=4), size=100)
    prompt = [*range(10, 70)]
    with cache.acquire(prompt) as lease:
        lease.decode()
        lease.decode([5] * 10)
    with cache.acquire([7] * 60) as lease:
        lease.decode()
    with cache.acquire([*prompt, *([5] * 10), 6]) as lease:
        assert lease.cached == 70
    cache.check()


def test_shifted_tokens_are_no_prefix(tmp_path: Path) -> None:
    """A slot of a sliding window was shifted: its state belongs to other tokens."""
    ctx = kit.context(tmp_path, n_ctx=512)
    object.__setattr__(ctx.info, "memory", MemoryType.SWA)
    cache = SlotCache(ctx, n_slots=1, size=64, keep=2, checkpoints=OFTEN)
    with cache.acquire([*range(10, 70)]) as lease:
        lease.decode()
        lease.decode([5] * 60)
        shifted = lease.sequence.tokens
        assert lease.sequence.ledger.moved
    with cache.acquire([3] * 30) as lease:
        lease.decode()
    assert cache.branches.tier is not None
    assert cache.branches.longest_state(tokens_to_key(shifted), NO_SALT).end < len(shifted)
    with cache.acquire([*shifted[:60], 9]) as lease:
        assert lease.cached <= 2


def test_dropped_slots_leave_no_states(tmp_path: Path) -> None:
    """After a change of the adapters, no prompt continues an earlier state."""
    cache = SlotCache(recurrent(tmp_path), n_slots=1, checkpoints=OFTEN)
    chat = [*range(10, 40)]
    with cache.acquire(chat) as lease:
        lease.decode()
    assert cache.stats().states == 2
    cache.drop_prefixes()
    assert (cache.stats().states, cache.stats().bytes_by_tier["states"]) == (0, 0)
    assert cache.branches.tree.nodes == 0
    with cache.acquire(chat) as lease:
        assert lease.cached == 0


def test_a_budget_below_one_prompt_is_refused(tmp_path: Path) -> None:
    """The cache is unchanged, and serves shorter prompts."""
    cache = PrefixCache(recurrent(tmp_path), budget=1 << 14)
    assert prefix_kit.serve(cache, [1, 2, 3]) == 0
    before = cache.dump()
    with pytest.raises(BudgetTooSmall):
        cache.acquire([1, 2, 3] * 100)
    assert cache.dump() == before
    assert prefix_kit.serve(cache, [1, 2, 3, 4]) == 3


def test_a_state_that_cannot_be_restored_is_decoded_again(tmp_path: Path) -> None:
    """The slot's tokens are still those of the prompt."""
    ctx = recurrent(tmp_path)
    cache = SlotCache(ctx, n_slots=2)
    first, second, third = prompts(3, 60)
    for each in (first, second):
        with cache.acquire(each) as lease:
            lease.decode()
    ctx.native.state_load = lambda *_: 0
    with cache.acquire(third) as lease:
        assert lease.cached == 0
        lease.decode()
        assert lease.sequence.tokens == third
    cache.check()


@pytest.mark.parametrize("make", managers())
@pytest.mark.parametrize("error", [StateError("no"), MemoryError("no")])
def test_a_state_that_cannot_be_saved_fails_no_prompt(
    tmp_path: Path, make: Any, error: Exception
) -> None:
    """The cache works without states."""
    ctx = recurrent(tmp_path, n_seq_max=2)

    def failing(*_: object) -> bytes:
        raise error

    ctx.native.state_save = failing
    with make(ctx) as cache, Batcher(cache) as batcher:
        going = [batcher.submit(each, 4) for each in prompts(4, 60)]
        batcher.run()
        assert [one.finish_reason for one in going] == ["length"] * 4
        cache.check()


def test_a_state_that_a_prompt_continues_is_kept(tmp_path: Path) -> None:
    """If no sequence is vacant, the prompt takes the only one; its state becomes a page."""
    cache = PrefixCache(recurrent(tmp_path), entries=1)
    chat = [*range(10, 40)]
    prefix_kit.serve(cache, chat, [5] * 20)
    for number in range(3):
        assert prefix_kit.serve(cache, [*chat, *([5] * 20), 60 + number, 7], [9] * 10) == 50


def test_recurrent_lease_is_forked_at_its_position(tmp_path: Path) -> None:
    """A longer branch cannot be cut to the length of the lease, so the lease is the source."""
    ctx = recurrent(tmp_path)
    cache = PrefixCache(ctx)
    first, second = prompts(2, 60)
    prefix_kit.serve(cache, first)
    with cache.acquire(second) as lease:
        lease.sequence.prefill(second[:30])
        with cache.acquire([*second[:30], 99]) as other:
            assert other.cached == 30
            assert other.sequence.tokens == second[:30]
    cache.check()


@pytest.mark.regression(
    "a prompt failed if it had to evict a state that exceeded the budget of checkpoints, in a "
    "cache with paging",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize("budget", [0, 10])
def test_budget_below_a_state_drops_branches(tmp_path: Path, budget: int) -> None:
    """Branches are dropped instead of paged out; a pinned one stays, and refuses the prompt."""
    cache = PrefixCache(
        recurrent(tmp_path, n_seq_max=1),
        paging="memory",
        checkpoints=CheckpointSchedule(budget=budget),
    )
    for number in range(4):
        prefix_kit.serve(cache, [number] * 40)
    assert cache.stats().paged == 0
    cache.pin("last", [3] * 40)
    with pytest.raises(PagingError, match="budget of checkpoints"):
        cache.acquire([4] * 40)
    cache.check()
    cache.unpin("last")
    assert prefix_kit.serve(cache, [3] * 41) == 40


def test_an_interruption_while_a_state_is_saved_changes_nothing(tmp_path: Path) -> None:
    """Ctrl-C ends a save: earlier branches remain, and the prompt can be repeated."""
    ctx = recurrent(tmp_path)
    cache = PrefixCache(ctx, checkpoints=OFTEN, entries=1)
    prefix_kit.serve(cache, [3] * 40)
    real, before = ctx.native.state_save, prefix_kit.leaves(cache)

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    ctx.native.state_save = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.acquire([4] * 40)  # pages the only sequence out
    ctx.native.state_save = real
    cache.check()
    assert prefix_kit.leaves(cache) == before
    assert prefix_kit.serve(cache, [4] * 40) == 0
    assert prefix_kit.serve(cache, [3] * 41) == 40


def test_a_cancel_while_a_state_is_saved_ends_the_prefill(tmp_path: Path) -> None:
    """A cancel between two batches of a prefill is not lost."""
    ctx = recurrent(tmp_path)
    cache = PrefixCache(ctx, checkpoints=OFTEN)
    others = [cache.acquire([each]) for each in (5, 6, 7)]  # no sequence is left for a state
    real = ctx.native.state_save

    def cancelling(*arguments: Any) -> bytes:
        ctx.cancel()
        return real(*arguments)

    ctx.native.state_save = cancelling
    with cache.acquire([3] * 40) as lease:
        with pytest.raises(Cancelled, match="32 tokens left"):
            lease.prefill()
        assert len(lease.sequence) == 8  # the first state of a prompt is saved
        ctx.native.state_save = real
        lease.prefill()
        assert len(lease.sequence) == 40
    for each in others:
        each.release()
    cache.check()


def test_schedule_of_another_type_is_refused(tmp_path: Path) -> None:
    """It is a usage error."""
    assert checked_schedule(None).interval == 512
    for make in (PrefixCache, SlotCache):
        with pytest.raises(TypeError):
            make(kit.context(tmp_path), checkpoints=3)  # type: ignore[operator]


def test_attention_memory_stores_no_states(tmp_path: Path) -> None:
    """Every position of a cache of cells is a prefix already; nothing is saved."""
    ctx = kit.context(tmp_path, n_ctx=512)
    ctx.native.state_save = None
    for make in (PrefixCache, SlotCache):
        with make(ctx, checkpoints=OFTEN) as cache, Batcher(cache) as batcher:
            found = []
            for each in prompts(3, 100):
                found.append(batcher.submit(each, 2, checkpoints=[50]))
                batcher.run()
            assert [one.cached for one in found] == [0, 100, 100]
