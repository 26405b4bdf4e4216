"""Test that prompts with different salts share neither slots' histories nor saved states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import UsageError
from pyllamakv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.slot_choice import Policy

PROMPT = [10 + i % 40 for i in range(24)]


def make(folder: Path, *, policy: Policy = "best", states: bool = False, n: int = 4) -> SlotCache:
    """Make a cache of slots of 64 tokens, of a memory with states or one that can be trimmed."""
    ctx = kit.context(folder, {"partial": not states}, n_ctx=256, n_seq_max=4)
    if states:
        object.__setattr__(ctx.info, "memory", MemoryType.RECURRENT)
    often = CheckpointSchedule(size=100, interval=8, first=1)
    return SlotCache(ctx, n, policy, size=64, checkpoints=often)


def cached(cache: SlotCache, salt: str | None, last: int) -> int:
    """Serve a prompt, and return how much of it was cached."""
    with cache.acquire([*PROMPT, last], salt=salt) as lease:
        lease.decode()
    cache.check()
    return lease.cached


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("policy", ["best", "longest"])
def test_slots_of_other_salts_are_not_continued(
    tmp_path: Path, policy: Policy, states: bool, n: int
) -> None:
    """Neither in place nor as a copy; states that were evicted from a slot return to their salt."""
    cache = make(tmp_path, policy=policy, states=states, n=n)
    assert [cached(cache, salt, 1) for salt in ("a", "b", None)] == [0, 0, 0]
    again = [cached(cache, salt, 2) for salt in ("a", "b", None)]
    # With one slot, a history is lost unless its state was saved.
    assert again == ([0, 0, 0] if n == 1 and not states else [len(PROMPT)] * 3)


@pytest.mark.parametrize("salt", ["", 5])
def test_a_salt_of_a_slot_is_text(tmp_path: Path, salt: Any) -> None:
    """Nothing is leased with another one."""
    cache = make(tmp_path)
    with pytest.raises(UsageError, match="salt"):
        cache.acquire(PROMPT, salt=salt)
    assert cache.stats().in_use == 0


def test_a_parked_slot_keeps_its_salt(tmp_path: Path) -> None:
    """Also if another salt's prompt took its slot meanwhile."""
    cache = make(tmp_path, n=1)
    lease = cache.acquire(PROMPT, salt="a")
    lease.decode()
    parked = lease.park()
    assert cached(cache, "b", 1) == 0
    with parked.resume([*PROMPT, 1]) as lease:
        assert lease.cached == len(PROMPT)
        lease.decode()
    assert cached(cache, "b", 2) == 0
    assert cached(cache, "b", 3) == len(PROMPT)


def test_a_slot_that_was_interrupted_is_of_no_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after a copy, before the slot is leased: neither salt continues it by mistake."""
    cache = make(tmp_path)
    assert cached(cache, "a", 1) == 0
    copy_to = Sequence.copy_to

    def interrupted(*arguments: Any) -> None:
        copy_to(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sequence, "copy_to", kit.ours(interrupted))
    with pytest.raises(KeyboardInterrupt):
        cache.acquire([*PROMPT, 2], salt="a")
    monkeypatch.undo()
    assert [slot.salt for slot in cache._slots].count(None) == 1
    assert cached(cache, "b", 1) == 0
    assert cached(cache, "a", 3) == len(PROMPT)


def test_generations_continue_slots_of_their_salt(tmp_path: Path) -> None:
    """As with a prefix cache; usage reports no tokens of other salts."""
    with Batcher(make(tmp_path)) as batcher:
        for salt, reused in (("a", 0), ("b", 0), (None, 0), ("a", 24), ("b", 24), (None, 24)):
            going = batcher.submit([*PROMPT, 1], 2, salt=salt)
            batcher.run()
            assert going.usage.reused == reused
