"""Test the ring of checkpoints against a plain list, and the cases that earlier rings had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.cache.checkpoints import Checkpoint, CheckpointSchedule, Ring
from pyllamakv.errors import UsageError


def ring(*positions: int, size: int = 24, interval: int = 1, budget: int = 1 << 30) -> Ring:
    """Return a ring with checkpoints at these positions, of 10 bytes each."""
    made = Ring(CheckpointSchedule(size, interval, 0, budget))
    for pos in positions:
        made.put(Checkpoint(pos, b"x" * 10))
    return made


def test_the_best_is_the_last_before_the_target() -> None:
    """PrepareRestore: of 5, 9 and 15 the target 12 goes back to 9, to go on at 10."""
    best = ring(5, 9, 15).best(12)
    assert best is not None
    assert best.pos + 1 == 10
    assert ring(5, 9, 15).best(5) is None
    assert ring(5, 9, 15).best(6) == Checkpoint(5, b"x" * 10)


def test_full_ring_overwrites_the_oldest_checkpoint() -> None:
    """BestIndex: of three places the first checkpoint gives way to the fourth."""
    kept = ring(1, 2, 3, 4, size=3)
    assert kept.positions == [2, 3, 4]
    assert kept.best(2) is None
    assert [each.pos for each in kept] == [2, 3, 4]


def test_ring_keeps_the_latest_checkpoints_after_many_rounds() -> None:
    """RingWrapAround and FullCapacity: the last 24 remain, and their bytes are counted."""
    kept = ring(*range(0, 1000, 10))
    assert kept.positions == list(range(760, 1000, 10))
    assert (len(kept), kept.bytes) == (24, 240)
    assert ring(*range(24)).positions == list(range(24))


def test_empty_ring_returns_no_checkpoint() -> None:
    """EmptyBuffer: it answers, and pruning it does no harm."""
    kept = ring()
    kept.prune(-1)
    assert kept.best(100) is None
    assert kept.at(0) is None
    assert (len(kept), kept.bytes, kept.positions) == (0, 0, [])


def test_checkpoints_after_a_position_are_pruned() -> None:
    """PruneAfter and PruneAfterAll: a sequence that went back has no later past."""
    kept = ring(5, 9, 15)
    kept.prune(9)
    assert (kept.positions, kept.bytes) == ([5, 9], 20)
    kept.prune(-1)
    assert (kept.positions, kept.bytes) == ([], 0)
    assert kept.due == 0


def test_checkpoint_without_bytes_is_skipped() -> None:
    """RejectsIncomplete and AcceptsComplete: without its bytes a checkpoint is none."""
    kept = ring(5)
    kept.put(Checkpoint(9, b""))
    assert not Checkpoint(9, b"").complete
    best = kept.best(12)
    assert best is not None
    assert best.pos == 5
    assert kept.at(9) is None
    assert kept.at(5) is best


def test_removal_drops_later_checkpoints() -> None:
    """ShiftRange: of 1, 4, 7, 10 a removal of 2..6 leaves 1.

    The ring that this one is measured by kept 7 and 10 and moved them to 3 and 6; but a state of
    after 7 remembers what was removed, so that who resumed there did not get what a fresh
    context gives.
    """
    kept = ring(1, 4, 7, 10)
    kept.prune(2 - 1)
    assert kept.positions == [1]


def test_checkpoints_are_due_at_the_interval() -> None:
    """None before position 16, then one every 1664 positions, and again after going back."""
    kept = Ring()
    assert (kept.due, kept.schedule.size, kept.schedule.interval) == (16, 24, 1664)
    kept.put(Checkpoint(20, b"x"))
    assert kept.due == 1684
    kept.put(Checkpoint(1700, b"x"))
    assert kept.due == 3364
    kept.prune(1000)
    assert kept.due == 1684
    kept.prune(0)
    assert kept.due == 16


def test_checkpoints_stay_within_the_byte_budget() -> None:
    """The oldest go first, and one that is larger than everything is not kept."""
    kept = ring(1, 2, 3, 4, budget=25)
    assert (kept.positions, kept.bytes) == ([3, 4], 20)
    kept.put(Checkpoint(5, b"x" * 26))
    assert (kept.positions, kept.bytes, kept.due) == ([], 0, 6)
    assert not len(ring(1, 2, size=0))


def test_a_copy_has_the_checkpoints_of_its_prefix() -> None:
    """Whoever copies 10 positions has no past behind them."""
    copied = ring(1, 2, 3)
    copied.copy_from(ring(5, 9, 10, 15), 10)
    assert copied.positions == [5, 9]


@pytest.mark.parametrize("wrong", [{"size": -1}, {"interval": 0}, {"first": -1}, {"budget": -1}])
def test_a_schedule_that_cannot_be(wrong: dict[str, int]) -> None:
    """Numbers that mean nothing are refused."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CheckpointSchedule(**wrong)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 60), st.integers(0, 12)),
            st.tuples(st.just("prune"), st.integers(-1, 60), st.just(0)),
        ),
        max_size=60,
    ),
    st.integers(1, 6),
    st.integers(0, 40),
)
def test_ring_agrees_with_a_list_of_checkpoints(
    steps: list[tuple[str, int, int]], size: int, budget: int
) -> None:
    """Whatever is put and pruned, positions, bytes and the best are those of a plain list."""
    kept, plain = Ring(CheckpointSchedule(size, 3, 2, budget)), []
    for what, pos, length in steps:
        if what == "put":
            plain = [each for each in plain if each.pos < pos] + [Checkpoint(pos, b"x" * length)]
            while len(plain) > size or sum(len(each.saved) for each in plain) > budget:
                del plain[0]
            kept.put(
                plain[-1] if plain and plain[-1].pos == pos else Checkpoint(pos, b"x" * length)
            )
        else:
            plain = [each for each in plain if each.pos <= pos]
            kept.prune(pos)
        assert list(kept) == plain
        assert kept.bytes == sum(len(each.saved) for each in plain)
        for target in range(0, 62, 7):
            fitting = [each for each in plain if each.pos < target and each.saved]
            assert kept.best(target) == (fitting[-1] if fitting else None)
