"""Test several prompts at once that are cancelled, interrupted and closed at any time."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import Fixed, alone

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache import prefix_states
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.prefix_states import PrefillBackup, SaveTime
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Busy, Cancelled, Closed, NativeError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


def test_cancel_between_steps_frees_only_its_slot(ctx: Context) -> None:
    """A cancelled request keeps its text and frees its slot; the others continue."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("Hi", 20), batcher.submit("Ho", 20)
    waiting = batcher.submit("Hu", 20)
    for _ in range(5):
        batcher.step()
    one.cancel()
    waiting.cancel()
    batcher.run()
    assert (one.finish_reason, len(one.tokens)) == ("cancelled", 5)
    assert (other.finish_reason, len(other.tokens)) == ("length", 20)
    assert waiting.finish_reason == "cancelled"
    with pytest.raises(Cancelled, match="after 5 tokens") as caught:
        one.result()
    assert caught.value.text == one.text != ""
    one.cancel()
    # The decoded tokens are reused by the next request.
    again = batcher.submit([*one.prompt, *one.tokens, 70], 1)
    again.result()
    assert again.cached == len(one.prompt) + 4
    stats = batcher.stats()
    assert (stats.finished, stats.cancelled, stats.failed) == (2, 2, 0)


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("whole", [False, True])
def test_cancel_during_a_decode_ends_its_generations(ctx: Context, whole: bool) -> None:
    """From another thread: a generation's cancel ends only it, the context's all of them."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("x" * 60, 5), batcher.submit("Ho", 5)
    batcher.step()
    ctx.native.gate.clear()
    ctx.native.entered.clear()
    thread = in_thread(batcher.run)
    assert ctx.native.entered.wait(120)
    before = len(one.sequence)
    ctx.cancel() if whole else one.cancel()
    ctx.native.gate.set()
    thread.join(120)
    assert not thread.is_alive()
    assert one.finish_reason == "cancelled"
    # Tokens decoded before are kept, those of the cancelled decode are not.
    assert before == len(cache._slots[0].tokens) == 32
    assert other.finish_reason == ("cancelled" if whole else "length")
    cache.check()
    later = batcher.submit("x" * 60, 2)
    later.result()
    assert later.cached == 32


@pytest.mark.parametrize("both", [False, True])
def test_cancel_does_not_empty_the_states_of_others(ctx: Context, both: bool) -> None:
    """An interrupted decode empties all sequences of a memory with states."""
    object.__setattr__(ctx.info, "memory", MemoryType.HYBRID)
    batcher = Batcher(SlotCache(ctx))
    one, other = batcher.submit("Hi", 20), batcher.submit("Ho", 20)
    for _ in range(3):
        batcher.step()
    ctx.native.gate.clear()
    ctx.native.entered.clear()
    cancels = ctx.cancels
    thread = in_thread(batcher.run)
    assert ctx.native.entered.wait(120)
    one.cancel()
    if both:
        other.cancel()
    ctx.native.gate.set()
    thread.join(120)
    assert ctx.cancels - cancels == both
    assert one.finish_reason == "cancelled"
    assert other.finish_reason == ("cancelled" if both else "length")
    if not both:
        evaluated = len(one.prompt) + len(one.tokens) + len(other.prompt) + len(other.tokens)
        assert batcher.stats().decoded_tokens <= evaluated


@pytest.mark.parametrize("how", ["cancelled", "no cells"])
def test_no_group_is_split_after_a_micro_batch_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The later micro-batches of the step do not begin at other tokens than planned."""
    ctx = kit.context(tmp_path, n_ctx=256, n_ubatch=8)
    cache = SlotCache(ctx)
    with Batcher(cache) as batcher:
        one = batcher.submit(range(50, 54), 2, stop_at_end=False)
        other = batcher.submit(range(22), 2, groups=[(10, 16)], stop_at_end=False)
        real = ctx.native.decode
        lengths: list[int] = []
        left = [1 if how == "cancelled" else 3]  # of both together, then of each one

        def decode(*args: Any) -> int:
            lengths.append(len(other.ledger))
            left[0] -= 1
            if left[0] < 0:
                return real(*args)
            if how == "no cells":
                return 1
            one.cancel()
            return 2

        monkeypatch.setattr(ctx.native, "decode", decode)
        monkeypatch.setattr(cache, "relieve", lambda: True)
        batcher.run()
    assert not {*lengths} & {*range(11, 16)}
    assert one.finish_reason == ("cancelled" if how == "cancelled" else "length")
    assert other.finish_reason == "length"
    assert lengths.count(0) > 1


def test_a_prompt_that_is_cancelled_before_its_micro_batch_is_not_decoded(tmp_path: Path) -> None:
    """Also if the micro-batch that runs has none of its tokens."""
    ctx = kit.context(tmp_path, n_ctx=256, n_ubatch=8)
    with Batcher(SlotCache(ctx)) as batcher:
        one = batcher.submit(range(50, 58), 2, stop_at_end=False)
        other = batcher.submit(range(22), 2, stop_at_end=False)
        real = ctx.native.decode

        def decode(*args: Any) -> int:
            other.cancel()
            return real(*args)

        ctx.native.decode = decode
        batcher.run()
        assert (one.finish_reason, other.finish_reason) == ("length", "cancelled")
        assert batcher.stats().decoded_tokens == 8 + 1


def test_earlier_cancel_does_not_end_later_requests(ctx: Context) -> None:
    """An earlier cancel does not end requests that are submitted later."""
    batcher = Batcher(SlotCache(ctx))
    ctx.cancel()
    ctx.native._get(ctx.handle).cancelled = False
    assert len(batcher.submit("Hi", 3).result()) == 3


def test_closed_context_fails_every_request(ctx: Context) -> None:
    """A request that cannot continue has the reason in its result."""
    batcher = Batcher(SlotCache(ctx))
    one = batcher.submit("Hi", 5)
    batcher.step()
    ctx.close()
    with pytest.raises(Closed):
        batcher.step()
    assert (one.finish_reason, type(one.error)) == ("failed", Closed)


def test_close_cancels_generations_and_keeps_the_manager(ctx: Context) -> None:
    """The manager and its cached tokens remain."""
    cache = SlotCache(ctx)
    with Batcher(cache) as batcher:
        one = batcher.submit("Hi", 5)
        batcher.step()
    assert one.finish_reason == "cancelled"
    assert cache.stats().in_use == 0
    assert cache.stats().tokens == 3
    assert batcher.stats().to_json()["cancelled"] == 1


def test_an_interrupt_between_decode_and_choice_loses_nothing(tmp_path: Path, ctx: Context) -> None:
    """After the exception, the loop continues, and each prompt gets the same text as alone."""
    batcher = Batcher(SlotCache(ctx))
    one, other = batcher.submit("Hi", 8), batcher.submit("Hello", 8)
    real = ctx.native.sample_all

    def interrupted(*args: Any) -> list[int]:
        ctx.native.sample_all = real
        raise KeyboardInterrupt

    for _ in range(3):
        batcher.step()
        ctx.native.sample_all = interrupted
        with pytest.raises(KeyboardInterrupt):
            batcher.step()
    batcher.run()
    assert one.text == alone(tmp_path, "Hi", 8)
    assert other.text == alone(tmp_path, "Hello", 8)


@pytest.mark.parametrize("n", [2, 4])
def test_an_exception_during_a_release_ends_one_generation_only(ctx: Context, n: int) -> None:
    """The next step removes the ended one, and does not access its sequence again."""
    cache = SlotCache(ctx)
    batcher = Batcher(cache)
    one, other = batcher.submit("Hi", n), batcher.submit("Hello", 8)
    batcher.step()
    lease = one.lease
    assert lease is not None
    real = lease.release

    def interrupted() -> None:
        real()
        raise KeyboardInterrupt

    lease.release = interrupted
    with pytest.raises(KeyboardInterrupt):
        batcher.run()
    kept = lease.sequence.tokens
    batcher.run()
    assert (one.finish_reason, other.finish_reason, batcher.stats().finished) == (
        "length",
        "length",
        2,
    )
    assert lease.sequence.tokens == kept
    cache.check()


@pytest.mark.parametrize("when", [1, 4])
def test_cancel_during_sampling_ends_the_next_step(ctx: Context, when: int) -> None:
    """The next step ends it at any time."""
    batcher = Batcher(SlotCache(ctx))

    class Leaving(Fixed):
        def sample(self, context: Context, index: int = -1) -> int:
            if len(self.tokens) == 21 - when:
                one.cancel()
            return super().sample(context, index)

    one = batcher.submit("Hi", 20, sampler=Leaving([70] * 20))
    other = batcher.submit("Ho", 6)
    batcher.run()
    assert (one.finish_reason, len(one.tokens)) == ("cancelled", when)
    assert other.finish_reason == "length"


def test_cancelled_waiting_request_ends_at_the_next_step(ctx: Context) -> None:
    """A cancelled request without a slot ends at the next step; the running one is unaffected."""
    batcher = Batcher(SlotCache(ctx, 1))
    one, waiting = batcher.submit("Hi", 12), batcher.submit("Ho", 12)
    for _ in range(4):
        batcher.step()
    waiting.cancel()
    batcher.step()
    assert (waiting.finish_reason, one.finish_reason, len(one.tokens)) == ("cancelled", None, 5)
    batcher.run()
    assert one.finish_reason == "length"


class CancelsLater:
    """A library that cancels the decode after ``left`` tokens."""

    def __init__(self, native: Any) -> None:
        self.native, self.left = native, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def decode(self, handle: Any, tokens: Any, *others: Any) -> Any:
        self.left -= len(tokens)
        return 2 if self.left < 0 else self.native.decode(handle, tokens, *others)


@pytest.mark.parametrize(
    "how",
    [
        *("acquire", "prefill again", "batcher", "store", "store again"),
        *("slots", "slots again", "slots batcher"),
    ],
)
@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.SWA, MemoryType.HYBRID])
def test_a_prompt_that_is_cancelled_repeatedly_is_completed(
    tmp_path: Path, memory: MemoryType, how: str
) -> None:
    """Complete micro-batches remain: 500 tokens, of which each try evaluates 80, need 8 tries."""
    prompt = [3 + (7 * i * i + i) % 250 for i in range(500)]
    ctx = kit.context(
        tmp_path, {"partial": memory is MemoryType.ATTENTION}, n_ctx=1024, n_batch=64, n_ubatch=16
    )
    object.__setattr__(ctx.info, "memory", memory)
    native = CancelsLater(ctx.native)
    ctx.native = native  # type: ignore[assignment]
    options: Any = {"store": tmp_path / "store"} if "store" in how else {}
    cache: Any = SlotCache(ctx, size=600) if "slots" in how else PrefixCache(ctx, **options)
    with cache, Batcher(cache) as batcher:
        lease, tries = cache.acquire(prompt), 0
        done = False
        while not done:
            tries += 1
            assert tries <= 8
            native.left = 80
            if "batcher" in how:
                lease.release()
                one = batcher.submit(prompt, 1, stop_at_end=False)
                batcher.run()
                done = one.finish_reason == "length"
                continue
            if "again" not in how:
                lease.release()
                lease = cache.acquire(prompt)
            with suppress(Cancelled):
                lease.decode() if "slots" in how else lease.prefill()
                done = True
        assert lease.released or lease.sequence.tokens == prompt
        assert lease.released or lease.backup is None
        lease.release()
        cache.check()
        if options:
            assert len(cache.stored.store.pages) <= 3
    assert native.left >= 0


STORED = [3 + (7 * i * i + i) % 250 for i in range(200)]


def hybrid(
    folder: Path, make: Any = PrefixCache, **options: Any
) -> tuple[PrefixCache, CancelsLater]:
    """Return a cache of a hybrid memory, and its library, which cancels no decode yet."""
    ctx = kit.context(folder, n_ctx=1024, n_batch=64, n_ubatch=16)
    object.__setattr__(ctx.info, "memory", MemoryType.HYBRID)
    native = CancelsLater(ctx.native)
    native.left = 1 << 30
    ctx.native = native  # type: ignore[assignment]
    return make(ctx, **options), native


@pytest.mark.parametrize("store", [True, False])
def test_a_sequence_with_other_tokens_is_no_backup_of_its_prompt(
    tmp_path: Path, store: bool
) -> None:
    """Its state would be restored as that of the prompt."""
    cache, native = hybrid(tmp_path, **({"store": tmp_path / "store"} if store else {}))
    with cache:
        lease = cache.acquire(STORED)
        assert lease.backup is not None
        lease.backup.expect_cancel()
        lease.sequence.prefill([9] * 20)
        lease.checkpoint()
        native.left = 0
        with suppress(Cancelled):
            lease.prefill()
        lease.release()
        with cache.acquire(STORED) as again:
            assert again.cached == 0


def test_a_backup_is_replaced_by_a_longer_one_that_fits_only(tmp_path: Path) -> None:
    """It stays, as a page after a cancel, if the next one exceeds the budget or fails."""
    cache, native = hybrid(tmp_path, checkpoints=CheckpointSchedule())
    with cache, cache.acquire(STORED) as lease:
        assert lease.backup is not None
        lease.backup.expect_cancel()
        native.left = 40
        with suppress(Cancelled):
            lease.prefill()
        good = lease.backup.saved
        assert lease.backup.length == 32
        lease.make_room(300)
        assert lease.backup.saved == b""
        assert cache.stats().bytes_by_tier["memory"] == len(good)
        for budget in (len(good), 1 << 30):
            native.left = 20
            object.__setattr__(cache.branches.schedule, "budget", budget)
            with suppress(Cancelled):
                lease.prefill()
            assert (lease.backup.saved, lease.backup.length) == (b"", 32)
            assert cache.cached_length(STORED) == 32
            assert cache.stats().bytes_by_tier["memory"] == len(good)
            native.state_save = failing  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [PrefixCache, SlotCache])
def test_states_of_cancelled_prompts_stay_within_the_schedule(tmp_path: Path, make: Any) -> None:
    """Each cancel leaves the state of a longer part of the prompt; the latest ones are kept."""
    cache, native = hybrid(
        tmp_path, make, checkpoints=CheckpointSchedule(size=2, interval=512, first=16)
    )
    with cache:
        for tries in range(1, 5):
            native.left = 40
            with cache.acquire(STORED) as lease, suppress(Cancelled):
                lease.prefill() if make is PrefixCache else lease.decode()
            assert cache.cached_length(STORED) >= 32 * tries - 16
            assert cache.branches.tier.count <= 2
        stats = cache.stats().to_json()
        assert stats["state_evictions" if make is SlotCache else "evictions"] == 2
        cache.check()


@pytest.mark.parametrize("make", [PrefixCache, SlotCache])
def test_pages_and_backups_share_the_budget_of_states(tmp_path: Path, make: Any) -> None:
    """Only a prompt that was cancelled takes the place of pages, and it is completed."""
    budget = 60_000
    schedule = CheckpointSchedule(interval=512, first=16, budget=budget)
    cache, native = hybrid(tmp_path, make, checkpoints=schedule)
    others = [[each] * 101 for each in (1, 2)]

    def evaluate(prompt: list[int], left: int) -> int:
        native.left = left
        with cache.acquire(prompt) as lease, suppress(Cancelled):
            try:
                lease.prefill() if make is PrefixCache else lease.decode()
            finally:
                assert cache.backups.size + cache.branches.tier.size <= budget
        found = cache.cached_length(prompt)
        by_tier = cache.stats().bytes_by_tier
        assert by_tier.get("states", by_tier.get("memory")) == cache.branches.tier.size <= budget
        return found

    with cache:
        leased = [cache.acquire([each]) for each in (3, 4, 5)]  # no sequence is left for a state
        for each in others:
            assert evaluate(each, 1000) == 100
        assert evaluate(STORED, 120) in {0, 16}
        assert [cache.cached_length(each) for each in others] == [100, 100]
        for tries in range(1, 6):
            evaluate(STORED, 40)
            assert cache.cached_length(STORED) >= 32 * tries
        cache.check()
        for one in leased:
            one.release()


@pytest.mark.parametrize("make", [PrefixCache, SlotCache])
def test_a_complete_prompt_continues_after_its_state(tmp_path: Path, make: Any) -> None:
    """A later cancel empties it; the same lease evaluates one token again, as a new one does."""
    cache, native = hybrid(tmp_path, make)
    with cache:
        others = [cache.acquire([each]) for each in range(3)]  # no sequence is left for a state
        lease = cache.acquire(STORED)
        evaluate = lease.prefill if make is PrefixCache else lease.decode
        evaluate()
        native.left = 0
        with suppress(Cancelled):
            lease.sequence.prefill([7])
        assert lease.sequence.tokens == []
        native.left = 1
        evaluate()
        assert lease.sequence.tokens == STORED
        for each in (lease, *others):
            each.release()
        cache.check()


@pytest.mark.parametrize("make", [PrefixCache, SlotCache])
def test_only_prompts_that_lost_tokens_are_saved_after_each_micro_batch(
    tmp_path: Path, make: Any
) -> None:
    """A lease that has not started lost none, and a prompt counts once, as the last one."""
    cache, native = hybrid(tmp_path, make)

    def cancel(lease: Any, left: int) -> None:
        native.left = left
        with suppress(Cancelled):
            lease.prefill() if make is PrefixCache else lease.decode()

    with cache:
        with cache.acquire(STORED[:20]) as lease:
            cancel(lease, 100)
        lease, waiting = cache.acquire(STORED), cache.acquire([9] * 50)
        started = cache.acquire([*STORED[:20], *[9] * 50])
        assert started.cached
        for _ in range(2):
            cancel(lease, 40)
            cache.cached_length(STORED)  # notes what is empty
        assert [each.backup.always for each in (lease, waiting, started)] == [True, False, False]
        cancel(waiting, 40)
        cancel(lease, 20)
        cache.cached_length(STORED)
        assert [key for key, _ in cache.backups._cancelled] == [waiting.key, lease.key]
        for each in (lease, waiting, started):
            each.release()


def failing(*_: Any) -> bytes:
    raise NativeError("no state")


@pytest.mark.regression(
    "another thread could clear the context between the check of a backup's tokens and its save",
    by="review",
    of="Python",
)
def test_other_threads_change_nothing_while_a_backup_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get Busy, and the backup is the state of its tokens."""
    cache, refused, real = hybrid(tmp_path)[0], [], prefix_states.tokens_to_key

    def clear() -> None:
        try:
            cache.context.clear()
        except Busy as error:
            refused.append(error)

    def meanwhile(tokens: Any) -> bytes:
        in_thread(clear).join(120)
        return real(tokens)

    with cache, cache.acquire(STORED) as lease:
        lease.sequence.prefill(STORED[:16])
        monkeypatch.setattr(prefix_states, "tokens_to_key", meanwhile)
        lease.checkpoint()
        assert len(refused) == 1
        assert lease.backup is not None
        assert (lease.backup.length, lease.sequence.tokens) == (16, STORED[:16])


def test_states_are_saved_for_a_cancel_in_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each save delays the next one; after a cancel, there is one after each micro-batch."""
    now = [0.0]
    monkeypatch.setattr(prefix_states, "monotonic", lambda: now[0])
    last = SaveTime()
    backup = PrefillBackup(last, always=False)
    saved = 0.0
    for length in range(100, 100_000, 100):
        now[0] += 1.0
        if backup.due(length, leases=2):
            now[0] += 0.1
            saved += 0.1
            backup.keep(length, b"state")
    assert 0.01 < saved / now[0] <= PrefillBackup.SHARE
    backup.expect_cancel()
    assert backup.due(backup.length + 1, leases=2)
    assert not backup.due(backup.length, leases=2)
    assert not backup.due(backup.length - 1, leases=2)
    # A failure keeps the state, and delays the next save as a save does.
    length, (attempts, began) = backup.length, (0, now[0])
    for more in range(1, 500):
        now[0] += 1.0
        if backup.due(length + more, leases=2):
            now[0] += 1.0
            attempts += 1
            backup.record_failure()
    assert 0 < attempts / (now[0] - began) <= PrefillBackup.SHARE
    assert (backup.length, backup.saved) == (length, b"state")
    # Another cache has times of its own.
    assert last.seconds == 1.0
    assert PrefillBackup(SaveTime(), always=False).due(1, leases=1)
