"""Test parked and resumed generations, with a simulated library that shows lost tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import alone, scripted
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, MemoryType
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.cache.tier import MemoryTier
from pyllamakv.errors import (
    KVCacheFull,
    NoSlotAvailable,
    PagingError,
    StateError,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.generation import Generation
    from pyllamakv.runtime.context import Context

CELLS = 96


def context(folder: Path, memory: MemoryType = MemoryType.ATTENTION, **options: Any) -> Context:
    """Return a context of 96 cells; with states, one whose sequences cannot be cut.

    A recurrent memory starts no sequence in place of a removed one before a clear.
    """
    partial = memory is MemoryType.ATTENTION
    restarts = memory is not MemoryType.RECURRENT
    options = {"n_ctx": CELLS, "n_seq_max": 4, **options}
    ctx = kit.context(folder, {"partial": partial, "restarts": restarts}, **options)
    object.__setattr__(ctx.info, "memory", memory)
    return ctx


MANAGERS = {
    "prefixes": lambda folder, **more: PrefixCache(context(folder, **more)),
    "prefixes in memory": lambda folder, **more: PrefixCache(
        context(folder, **more), paging="memory"
    ),
    "prefixes in files": lambda folder, **more: PrefixCache(
        context(folder, **more), paging=folder / "pages"
    ),
    "states": lambda folder, **more: PrefixCache(context(folder, MemoryType.HYBRID, **more)),
    "states without paging": lambda folder, **more: PrefixCache(
        context(folder, MemoryType.HYBRID, **more), checkpoints=CheckpointSchedule(size=0)
    ),
    "prefixes with a store": lambda folder, **more: PrefixCache(
        context(folder, **more), store=folder / "store"
    ),
    "states with a store": lambda folder, **more: PrefixCache(
        context(folder, MemoryType.HYBRID, **more), store=folder / "store"
    ),
    "slots": lambda folder, **more: SlotCache(context(folder, **more), size=CELLS),
    "slots with states": lambda folder, **more: SlotCache(
        context(folder, MemoryType.HYBRID, **more), size=CELLS
    ),
}

#: Managers whose memory starts no sequence in place of a removed one.
RECURRENT = {
    "recurrent": lambda folder: PrefixCache(context(folder, MemoryType.RECURRENT)),
    "recurrent store": lambda folder: PrefixCache(
        context(folder, MemoryType.RECURRENT), store=folder / "store"
    ),
    "recurrent slots": lambda folder: SlotCache(context(folder, MemoryType.RECURRENT), size=CELLS),
}


def submit(batcher: Batcher, n: int) -> list[tuple[Generation, str, int]]:
    """Submit requests that fit alone, some with a common prefix."""
    found = []
    for number in range(n):
        prompt = "common" * (number % 3) + "abcdefgh"[number % 8] * (20 + 5 * (number % 4))
        length = 12 + 7 * (number % 5)
        found.append((batcher.submit(prompt, length), prompt, length))
    return found


@pytest.mark.parametrize(("n", "n_batch"), [(4, 32), (8, 3), (16, 32)])
@pytest.mark.parametrize("name", MANAGERS | RECURRENT)
def test_all_requests_that_fit_alone_complete(
    tmp_path: Path, name: str, n: int, n_batch: int
) -> None:
    """They need 2, 4 and 8 times the cells of the cache; texts are the same as alone."""
    cache = (MANAGERS | RECURRENT)[name](tmp_path)
    with Batcher(cache, n_batch=n_batch) as batcher:
        going = submit(batcher, n)
        while batcher.step():
            if batcher.stats().decodes % 8 == 0:
                cache.check()
        for one, prompt, length in going:
            assert (one.finish_reason, one.error) == ("length", None)
            assert one.text == alone(tmp_path, prompt, length)
        assert batcher._queue.parks == batcher._queue.resumes > 0
    cache.check()
    settled(cache)


def settled(cache: Any) -> None:
    """Check that nothing remains of parked generations."""
    if isinstance(cache, PrefixCache):
        assert not any(node.parked for node in cache.branches.tree.walk())
        assert cache.branches._parking.count == 0


@pytest.mark.parametrize("name", MANAGERS)
def test_resumed_generation_keeps_its_cells(tmp_path: Path, name: str) -> None:
    """It continues with its cells, so its tokens cannot differ."""
    cache = MANAGERS[name](tmp_path)
    with Batcher(cache) as batcher:
        going = [batcher.submit(letter * 30, 24) for letter in "abcdef"]
        batcher.run()
        assert batcher._queue.parks > 0
        decoded = sum(len(one.prompt) + len(one.tokens) - 1 - one.cached for one in going)
        assert batcher.stats().decoded_tokens == decoded


@pytest.mark.parametrize("name", MANAGERS)
def test_sampler_and_stop_strings_continue(tmp_path: Path, name: str) -> None:
    """A stop string and a character may begin before a generation is parked, and end after."""
    text = ("gr\u00fcn \U0001f600 end" * 5).encode()
    cache = MANAGERS[name](tmp_path)
    with Batcher(cache) as batcher:
        going = [
            batcher.submit("x" * 20, 60, "\U0001f600 endgr\u00fcn \U0001f600 endg", scripted(text))
            for _ in range(6)
        ]
        batcher.run()
        assert {(one.finish_reason, one.text) for one in going} == {("stop", "gr\u00fcn ")}


@pytest.mark.parametrize("name", MANAGERS)
def test_a_parked_generation_may_be_cancelled(tmp_path: Path, name: str) -> None:
    """Its pages are freed; the others complete."""
    cache = MANAGERS[name](tmp_path)
    with Batcher(cache) as batcher:
        going = [one for one, *_ in submit(batcher, 6)]
        while batcher.step():
            parked = [one for one in going if one.parked is not None]
            if parked:
                parked[0].cancel()
        reasons = {one.finish_reason for one in going}
        assert reasons == {"cancelled", "length"}
        cache.check()
    settled(cache)


@pytest.mark.parametrize("name", MANAGERS)
def test_closed_batcher_frees_parked_generations(tmp_path: Path, name: str) -> None:
    """The cache then serves other requests."""
    cache = MANAGERS[name](tmp_path)
    with Batcher(cache) as batcher:
        submit(batcher, 6)
        while not batcher._queue.parks:
            batcher.step()
    settled(cache)
    with Batcher(cache) as batcher:
        assert batcher.submit("y" * 40, 6).result() == alone(tmp_path, "y" * 40, 6)
    cache.check()


def test_endless_generation_is_parked_after_max_wait(tmp_path: Path) -> None:
    """After ``max_wait`` steps it is parked for a waiting one, and resumed in its turn."""
    cache = SlotCache(context(tmp_path, n_seq_max=2), n_slots=1)
    with Batcher(cache, max_wait=10) as batcher:
        endless = batcher.submit("Once", None, stop_at_end=False)
        others = [batcher.submit(prompt, 25) for prompt in ("Hi", "Hello")]
        steps = next(n for n in itertools.count() if not batcher.step() or others[-1].done)
        # Three turns of each, of ten steps, while two others have theirs.
        assert steps <= 3 * 3 * 11
        for one, prompt in zip(others, ("Hi", "Hello"), strict=True):
            assert one.text == alone(tmp_path, prompt, 25)
        assert len(endless.tokens) >= 20
        assert endless.finish_reason is None
    cache.check()


def test_a_run_that_decodes_lost_tokens_again_is_not_interrupted(tmp_path: Path) -> None:
    """Each turn adds a token, even if nothing is kept and a prompt takes many steps."""
    cache = SlotCache(context(tmp_path, n_seq_max=2), n_slots=1)

    def failing(*_: object) -> bytes:
        raise StateError("no")

    cache.context.native.state_save = failing
    with Batcher(cache, n_batch=4, max_wait=3) as batcher:
        both = [batcher.submit(letter * 40, 5, stop_at_end=False) for letter in "xy"]
        for _ in range(1000):
            batcher.step()
        assert [len(one.tokens) for one in both] == [5, 5]
        assert batcher._queue.parks > 2
    cache.check()


def test_nothing_is_parked_without_max_wait(tmp_path: Path) -> None:
    """Without it, no generation is parked for a prompt that waits for a slot."""
    cache = SlotCache(context(tmp_path, n_seq_max=2), n_slots=1)
    with Batcher(cache, max_wait=None) as batcher:
        endless = batcher.submit("Once", None, stop_at_end=False)
        other = batcher.submit("Hi", 5)
        for _ in range(2000):
            batcher.step()
        assert (len(endless.tokens), other.cached) == (2000, None)
    for wrong in (0, -1, 1.5, "x"):
        with pytest.raises((UsageError, TypeError)):
            Batcher(cache, max_wait=wrong)  # type: ignore[arg-type]


def test_shifted_slot_is_resumed_with_its_cells(tmp_path: Path) -> None:
    """Its tokens were evaluated after discarded ones, so only its cells can continue."""
    cache = SlotCache(context(tmp_path, n_seq_max=2), n_slots=1, size=40, keep=4)
    with Batcher(cache, max_wait=10) as batcher:
        going = [batcher.submit(prompt, 100, stop_at_end=False) for prompt in ("Once", "Hi", "Ho")]
        batcher.run()
        assert batcher._queue.parks > 10
        assert cache.stats().shifts > 6
        texts = [one.text for one in going]
    cache.check()
    for prompt, text in zip(("Once", "Hi", "Ho"), texts, strict=True):
        own = SlotCache(context(tmp_path, n_seq_max=2), n_slots=1, size=40, keep=4)
        assert Batcher(own).submit(prompt, 100, stop_at_end=False).result() == text


@pytest.mark.parametrize("name", ["prefixes", "states", "slots", "slots with states"])
def test_parked_generation_without_a_state_is_evaluated_again(tmp_path: Path, name: str) -> None:
    """If the library saves no states, or fails, the text is the same, but later."""
    for capabilities in (ALL & ~Capability.STATES, ALL):
        cache = MANAGERS[name](tmp_path)
        native = cache.context.native
        object.__setattr__(native.about, "capabilities", capabilities)

        def failing(*_: object) -> bytes:
            raise StateError("no")

        native.state_save = failing
        with Batcher(cache) as batcher:
            for one, prompt, length in submit(batcher, 6):
                assert one.result() == alone(tmp_path, prompt, length)
        cache.check()
        settled(cache)


@pytest.mark.parametrize("name", MANAGERS)
def test_an_interruption_while_a_generation_is_parked_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    """Ctrl-C in any save or restore: the loop continues, and texts are the same as alone."""
    cache = MANAGERS[name](tmp_path)
    native, calls = cache.context.native, itertools.count(1)
    for method in ("state_save", "state_load"):
        real = getattr(native, method)

        def interrupted(*arguments: Any, real: Any = real) -> Any:
            if next(calls) % 3 == 0:
                raise KeyboardInterrupt
            return real(*arguments)

        setattr(native, method, interrupted)
    with Batcher(cache) as batcher:
        going = submit(batcher, 6)
        more = True
        while more:
            try:
                more = batcher.step()
            except KeyboardInterrupt:
                cache.check()
        for one, prompt, length in going:
            assert (one.finish_reason, one.error) == ("length", None)
            assert one.text == alone(tmp_path, prompt, length)
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", ["slots", "states"])
def test_an_interrupted_park_leaves_no_lease(tmp_path: Path, name: str) -> None:
    """Ctrl-C in the save of a parked generation, or of a kept state."""
    for number in (1, 2, 3):
        cache = MANAGERS[name](tmp_path)
        native = cache.context.native
        real, left = native.state_save, itertools.count(1 - number)

        def interrupted(*arguments: Any, real: Any = real, left: Any = left) -> Any:
            if next(left) == 0:
                raise KeyboardInterrupt
            return real(*arguments)

        native.state_save = interrupted
        with Batcher(cache) as batcher:
            going = [(batcher.submit(letter * 30, 24), letter) for letter in "abcd"]
            with pytest.raises(KeyboardInterrupt):
                batcher.run()
            batcher.run()
            for one, letter in going:
                assert one.error is None
                assert one.text == alone(tmp_path, letter * 30, 24)
        numbers = cache.stats().to_json()
        assert numbers.get("in_use", numbers.get("leased")) == 0
        cache.check()
        settled(cache)


def test_a_full_disk_fails_the_request_that_needs_room(tmp_path: Path) -> None:
    """A branch without a lease cannot be paged out: the step continues with the others."""
    cache = MANAGERS["prefixes in files"](tmp_path)

    def full(*_: object) -> None:
        raise PagingError("no space left", tmp_path)

    cache.branches.tier.write = full
    with cache.acquire([5] * 40) as old:
        old.prefill()
    with Batcher(cache) as batcher:
        small = batcher.submit("a" * 10, 8)
        large = batcher.submit("b" * 10, 80)
        batcher.run()
        assert small.text == alone(tmp_path, "a" * 10, 8)
        assert large.finish_reason == "failed"
        assert isinstance(large.error, PagingError)
    cache.check()
    assert not cache.leases


# Leases...


@pytest.mark.parametrize("name", MANAGERS)
def test_a_lease_is_parked_and_resumed(tmp_path: Path, name: str) -> None:
    """Sequence and cells are free for others, and the tokens continue afterwards."""
    cache = MANAGERS[name](tmp_path, n_seq_max=2)
    tokens = [*range(10, 70)]
    lease = cache.acquire(tokens)
    lease.sequence.prefill(lease.rest)
    parked = lease.park()
    for number in (5, 6, 7):
        with cache.acquire([number] * 60) as other:
            other.make_room(len(other.rest))
            other.sequence.prefill(other.rest)
        cache.check()
    for wrong in (tokens, tokens[:-1], [9, *tokens], [], "x"):
        with pytest.raises((UsageError, TypeError)):
            parked.resume(wrong)
    again = parked.resume([*tokens, 3])
    assert (again.cached, again.rest, again.sequence.tokens) == (60, [3], tokens)
    with pytest.raises(UsageError, match="not parked"):
        parked.resume([*tokens, 3])
    parked.close()
    again.release()
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", MANAGERS)
def test_a_lease_that_cannot_be_resumed_stays_parked(tmp_path: Path, name: str) -> None:
    """If cells or sequences are in use, nothing of the others changes."""
    cache = MANAGERS[name](tmp_path, n_seq_max=2)
    lease = cache.acquire([4] * 60)
    lease.sequence.prefill(lease.rest)
    parked = lease.park()
    other = cache.acquire([5] * 60)
    other.make_room(60)
    other.sequence.prefill(other.rest)
    with pytest.raises(KVCacheFull):
        parked.resume([4] * 61)
    third = cache.acquire([6])
    third.sequence.prefill(third.rest)
    with pytest.raises((KVCacheFull, NoSlotAvailable)):
        parked.resume([4] * 61)
    cache.check()
    assert other.sequence.tokens == [5] * 60
    other.release()
    third.release()
    again = parked.resume([4] * 61)
    assert again.sequence.tokens == [4] * 60
    again.release()
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", MANAGERS)
def test_a_released_lease_is_not_parked(tmp_path: Path, name: str) -> None:
    """Its slot may belong to another prompt, and its branch may be removed."""
    cache = MANAGERS[name](tmp_path)
    lease = cache.acquire([4] * 20)
    lease.sequence.prefill(lease.rest)
    parked = lease.park()
    for each in (lease, cache.acquire([5] * 20)):
        each.release()
        with pytest.raises(UsageError, match="was released"):
            each.park()
    parked.close()
    assert cache.stats().parks == 1
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", ["states", "slots with states"])
def test_checkpoints_are_due_after_parking_as_before(tmp_path: Path, name: str) -> None:
    """Check a named position, and the interval if text is parked more often than that."""
    cache = MANAGERS[name](tmp_path)
    prompt = [*range(10, 40)]
    lease = cache.acquire(prompt, checkpoints=[25])
    lease.sequence.prefill(prompt[:20])
    lease = lease.park().resume(prompt)
    assert lease.limit_batch(10) == 5
    lease.sequence.prefill(prompt[20:25])
    lease.checkpoint()
    lease.sequence.prefill(prompt[25:])
    before = lease.points
    lease = lease.park().resume([*prompt, 5])
    assert lease.points is before
    lease.release()
    with cache.acquire([*prompt[:25], 6, 7]) as again:
        assert again.cached == 25
    cache.check()


def test_a_branch_that_cannot_be_paged_in_yet_stays_parked(tmp_path: Path) -> None:
    """If two sequences are needed, it waits for them, so that nothing is evaluated again."""
    cache = PrefixCache(context(tmp_path, n_seq_max=2), paging="memory")
    head = [*range(10, 30)]
    first = cache.acquire([*head, *([5] * 20)])
    first.sequence.prefill(first.rest)
    parked = first.park()
    with cache.acquire([*head, *([6] * 20)]) as other:
        other.sequence.prefill(other.rest)
        cache.page_out([*head, *([5] * 20)])
    cache.page_out([*head, *([6] * 20)])
    with cache.acquire([7, 7]) as lease:
        lease.sequence.prefill(lease.rest)
        with pytest.raises(KVCacheFull):
            parked.resume([*head, *([5] * 21)])
        cache.check()
    again = parked.resume([*head, *([5] * 21)])
    assert again.cached == 40
    again.release()
    cache.check()


def test_memory_of_parked_branches_is_separate(tmp_path: Path) -> None:
    """Without paging, only parked branches have pages, and only while they are parked."""
    cache = PrefixCache(context(tmp_path), paging=0)
    with Batcher(cache, max_defer=0) as batcher:
        submit(batcher, 8)
        most = 0
        while batcher.step():
            most = max(most, cache.stats().paged_bytes)
            pages = {id(node.page) for node in cache.branches.tree.walk() if node.page}
            parked = sum(one.parked is not None for one in batcher._queue.waiting)
            assert len(pages) <= parked
    assert most > 0
    assert cache.stats().paged_bytes == 0
    assert isinstance(cache.branches._parking, MemoryTier)


@pytest.mark.parametrize("name", ["prefixes", "states"])
def test_prefix_of_parked_branches_is_freed_with_them(tmp_path: Path, name: str) -> None:
    """Without paging, the rest of a parked branch is stored, and then its prefix."""
    cache = MANAGERS[name](tmp_path, n_seq_max=2)
    head = [*range(10, 50)]
    first = cache.acquire([*head, 50])
    first.prefill()
    second = cache.acquire([*head, 60, 61, 62])
    second.prefill()
    parked = second.park()
    with cache.acquire([70] * 40) as other:
        other.prefill()
    first.release()
    with cache.acquire([80] * 60) as other, cache.acquire([90]):
        other.prefill()
        other.make_room(30)
    cache.check()
    again = parked.resume([*head, 60, 61, 62, 63])
    assert again.cached == 43
    again.release()
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", [name for name in MANAGERS if "slots" not in name])
def test_branch_point_of_parked_leases_frees_its_cells(tmp_path: Path, name: str) -> None:
    """A prompt that fits alone gets the cells of a prefix, and of all that continue it."""
    cache = MANAGERS[name](tmp_path)
    head = [*range(10, 50)]
    with cache.acquire([*head, 50, 51], checkpoints=[40]) as lease:
        lease.prefill()
    both = []
    for number in (60, 61):
        both.append(cache.acquire([*head, number, 7]))
        both[-1].prefill()
    parked = [lease.park() for lease in both]
    with cache.acquire([70] * 60) as other:
        other.prefill()
        other.make_room(30)
        other.sequence.prefill([7] * 30)
        cache.check()
    for number, each in zip((60, 61), parked, strict=True):
        with each.resume([*head, number, 7, 8]) as lease:
            assert lease.cached == 42
    cache.check()
    settled(cache)


@pytest.mark.parametrize("name", [name for name in MANAGERS if "slots" not in name])
def test_branch_point_frees_its_sequence_for_a_waiting_prompt(tmp_path: Path, name: str) -> None:
    """All sequences may be leased, although running prompts share a state."""
    cache = MANAGERS[name](tmp_path)
    head = [*range(10, 30)]
    with cache.acquire([*head, 50, 51], checkpoints=[20]) as lease:
        lease.prefill()
    leases = [cache.acquire([*head, number, 7]) for number in (60, 61, 62)]
    for lease in leases:
        lease.prefill()
    leases.append(cache.acquire([7, 8]))
    for lease in leases:
        lease.release()
    cache.check()


def test_a_prefix_of_a_parked_branch_that_cannot_be_saved_stays(tmp_path: Path) -> None:
    """The page of a parked branch cannot be used without it, so the other prompt is refused."""
    cache = MANAGERS["prefixes"](tmp_path)
    head = [*range(10, 50)]
    first = cache.acquire([*head, 50])
    first.prefill()
    second = cache.acquire([*head, 60, 61, 62])
    second.prefill()
    parked = second.park()
    with cache.acquire([70] * 53) as other:
        other.prefill()
    first.release()
    real = cache.context.native.state_save

    def failing(*_: object) -> bytes:
        raise StateError("no")

    cache.context.native.state_save = failing
    with pytest.raises(PagingError):
        cache.acquire([80] * 90)
    cache.check()
    cache.context.native.state_save = real
    again = parked.resume([*head, 60, 61, 62, 63])
    assert again.cached == 43
    again.release()
    cache.check()
    settled(cache)


def test_a_flush_includes_parked_branches(tmp_path: Path) -> None:
    """Their pages are in host memory, and would be lost with the process."""
    cache = MANAGERS["prefixes with a store"](tmp_path)
    lease = cache.acquire(range(10, 50))
    lease.prefill()
    parked = lease.park()
    with cache.acquire([5] * 80) as other:
        other.prefill()
        assert cache.stats().paged == 1
        cache.flush()
    parked.close()
    cache.close()
    later = MANAGERS["prefixes with a store"](tmp_path)
    assert later.acquire(range(10, 51)).cached == 40


@pytest.mark.regression(
    "recurrent generations failed on early releases if an idle branch was evicted before the "
    "first of them was decoded",
    by="random_operations",
    of="Python",
)
def test_recurrent_generations_start_although_a_prefix_was_loaded(tmp_path: Path) -> None:
    """The prompts' stored prefixes are loaded, but not used: they end inside of a group."""
    ctx = context(tmp_path, MemoryType.RECURRENT, n_seq_max=2)
    cache = PrefixCache(ctx, store=tmp_path / "store")
    prompts = [[*([first] * 20), 7, 7] for first in (10, 11)]
    with Batcher(cache) as batcher:
        for prompt in prompts:
            batcher.submit(prompt[:20], 1).result()
        cache.clear()
        going = [batcher.submit(each, 4, groups=[(18, 22)]) for each in prompts]
        batcher.run()
        for prompt, one in zip(prompts, going, strict=True):
            assert (one.finish_reason, one.error) == ("length", None)
            assert one.text == alone(tmp_path, prompt, 4)
    cache.check()
    settled(cache)


@pytest.mark.regression(
    "recurrent generations failed on early releases if an idle branch was evicted before the "
    "first of them was decoded",
    by="random_operations",
    of="Python",
)
@pytest.mark.parametrize("options", [{}, {"checkpoints": CheckpointSchedule(size=0)}])
def test_no_branch_is_evicted_before_a_leased_prompt_starts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """It cannot start in place of another one; afterwards, branches are evicted as usual."""
    with PrefixCache(context(tmp_path, MemoryType.RECURRENT), **options) as cache:
        with cache.acquire([10] * 20) as lease:
            lease.prefill()
        with cache.acquire([11] * 20) as lease:
            before = cache.stats().resident
            assert not cache.relieve()
            assert not cache.evict()
            assert cache.stats().resident == before > 0
            lease.prefill()
            assert cache.relieve()
            assert cache.stats().resident == before
        cache.check()


def test_the_budget_is_exceeded_until_a_leased_prompt_starts(tmp_path: Path) -> None:
    """The lease evicts the other branch when it is released."""
    ctx = context(tmp_path, MemoryType.RECURRENT)
    with PrefixCache(ctx) as cache, cache.acquire([10] * 10) as lease:
        lease.prefill()
        lease.release()
        size = cache.size
    with PrefixCache(ctx, budget=size * 3 // 2) as cache:
        for first in (10, 11):
            with cache.acquire([first] * 10) as lease:
                lease.prefill()
            assert cache.size == size
        assert cache.stats().evictions == 1
        cache.check()


@pytest.mark.parametrize("make", [PrefixCache, lambda ctx: SlotCache(ctx, 2)])
@pytest.mark.parametrize("removals", [1, 2])
def test_a_generation_that_cannot_start_is_tried_again_once(
    tmp_path: Path, make: Any, removals: int
) -> None:
    """A foreign sequence is removed before its first decodes."""
    ctx = context(tmp_path, MemoryType.RECURRENT)
    with make(ctx) as cache, Batcher(cache) as batcher:
        batcher.submit([9] * 20, 1).result()
        one = batcher.submit([10] * 20, 4)
        decode, left = ctx.decode, removals

        def remove_before(work: Any) -> None:
            nonlocal left
            if left:
                left -= 1
                with ctx.sequence() as other:
                    decode(other.feed([5, 6]))
            decode(work)

        ctx.decode = kit.ours(remove_before)  # type: ignore[method-assign]
        batcher.run()
        assert one.finish_reason == ("length" if removals == 1 else "failed")
        assert isinstance(one.error, Unsupported) == (removals > 1)
        cache.check()


def test_a_prompt_of_one_token_may_be_unable_to_start(tmp_path: Path) -> None:
    """The generation before it releases a sequence whose tokens another one has."""
    with (
        PrefixCache(context(tmp_path, MemoryType.RECURRENT)) as cache,
        Batcher(cache, n_batch=1) as batcher,
    ):
        batcher.submit([9], 1).result()
        going = [batcher.submit([first], length) for first, length in ((9, 1), (10, 3))]
        batcher.run()
        assert [(one.finish_reason, one.error) for one in going] == [("length", None)] * 2
        assert going[1].text == alone(tmp_path, [10], 3)
