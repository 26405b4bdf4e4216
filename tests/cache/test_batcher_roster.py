"""Test the state of a batcher's requests: waiting, active and served ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit

from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import NativeError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.generation import Generation


@pytest.fixture
def batcher(tmp_path: Path) -> Batcher:
    """Return a batcher over four slots."""
    return Batcher(SlotCache(kit.context(tmp_path, n_ctx=256)))


def stubborn(one: Generation) -> None:
    """Make the release of a lease fail after it has been released."""
    assert one.lease is not None
    release = one.lease.release

    def failing() -> None:
        release()
        raise NativeError("no")

    one.lease.release = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("which", [(0,), (0, 2), (0, 1, 2)])
def test_failed_release_still_ends_all_requests(batcher: Batcher, which: tuple[int, ...]) -> None:
    """The other requests are released, the list is empty, and the error is raised."""
    some = [batcher.submit([number] * 3) for number in (5, 6, 7)]
    batcher.step()
    for number in which:
        stubborn(some[number])
    waiting = [batcher.submit([9]) for _ in range(3)]
    with pytest.raises(NativeError):
        batcher.close()
    assert [one.finish_reason for one in (*some, *waiting)] == ["cancelled"] * 6
    assert all(one.lease is None for one in some)
    stats = batcher.stats()
    assert (stats.active, stats.waiting, stats.cancelled) == (0, 0, 6)


def test_a_failed_release_removes_the_generation(batcher: Batcher) -> None:
    """Only the cancelled one ends, and the others continue."""
    one, other = batcher.submit([5] * 3, 4), batcher.submit([6] * 3, 4)
    batcher.step()
    stubborn(one)
    one.cancel()
    with pytest.raises(NativeError):
        batcher.step()
    assert (one.finish_reason, other.finish_reason) == ("cancelled", None)
    assert batcher.stats().active == 1
    batcher.run()
    assert other.finish_reason == "length"
    assert batcher.stats().cancelled == 1


@pytest.mark.parametrize("n_batch", [4, 2])
def test_service_order_covers_every_request(tmp_path: Path, n_batch: int) -> None:
    """It does with turns, and if all continue in one batch after another."""
    with Batcher(SlotCache(kit.context(tmp_path, n_ctx=256)), n_batch=n_batch) as batcher:
        some = [batcher.submit([number], stop_at_end=False) for number in (5, 6, 7)]
        for _ in range(20):
            batcher.step()
        batcher.submit([8])  # ends requests without sampling
        last = batcher.stats().decodes
        assert last == 20
        assert all(last - 1 <= one.last_step <= last for one in some)
        counts = [len(one.tokens) for one in some]
        assert max(counts) - min(counts) <= 1
