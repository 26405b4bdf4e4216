"""Test the ring of checkpoints against a plain list, with the cases of ollama's tests.

The names in docstrings are those of ollama's tests.
"""

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


def test_best_checkpoint_is_the_last_before_the_target() -> None:
    """PrepareRestore: of 5, 9 and 15, target 12 returns to 9, to continue at 10."""
    best = ring(5, 9, 15).best(12)
    assert best is not None
    assert best.pos + 1 == 10
    assert ring(5, 9, 15).best(5) is None
    assert ring(5, 9, 15).best(6) == Checkpoint(5, b"x" * 10)


def test_full_ring_overwrites_the_oldest_checkpoint() -> None:
    """BestIndex: of three entries, the fourth checkpoint replaces the first."""
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
    """EmptyBuffer: it returns None, and can be pruned."""
    kept = ring()
    kept.prune(-1)
    assert kept.best(100) is None
    assert kept.at(0) is None
    assert (len(kept), kept.bytes, kept.positions) == (0, 0, [])


def test_checkpoints_after_a_position_are_pruned() -> None:
    """PruneAfter and PruneAfterAll: a sequence that went back has no later checkpoints."""
    kept = ring(5, 9, 15)
    kept.prune(9)
    assert (kept.positions, kept.bytes) == ([5, 9], 20)
    kept.prune(-1)
    assert (kept.positions, kept.bytes) == ([], 0)
    assert kept.due == 0


def test_checkpoint_without_bytes_is_skipped() -> None:
    """RejectsIncomplete and AcceptsComplete: a checkpoint without bytes is ignored."""
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

    Ollama's ring kept 7 and 10 as 3 and 6. But a state after 7 contains the removed tokens, so that
    a sequence resumed there differs from a new context.
    """
    kept = ring(1, 4, 7, 10)
    kept.prune(2 - 1)
    assert kept.positions == [1]


def test_checkpoints_are_due_at_the_interval() -> None:
    """None before position 16, then one every 1664 positions, and again after a rollback."""
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
    """The oldest are removed first, and one that exceeds the budget is not kept."""
    kept = ring(1, 2, 3, 4, budget=25)
    assert (kept.positions, kept.bytes) == ([3, 4], 20)
    kept.put(Checkpoint(5, b"x" * 26))
    assert (kept.positions, kept.bytes, kept.due) == ([], 0, 6)
    assert not len(ring(1, 2, size=0))


def test_a_copy_has_the_checkpoints_of_its_prefix() -> None:
    """A copy of 10 positions has no checkpoints beyond them."""
    copied = ring(1, 2, 3)
    copied.copy_from(ring(5, 9, 10, 15), 10)
    assert copied.positions == [5, 9]


@pytest.mark.parametrize("wrong", [{"size": -1}, {"interval": 0}, {"first": -1}, {"budget": -1}])
def test_invalid_checkpoint_schedule_is_refused(wrong: dict[str, int]) -> None:
    """Invalid numbers are refused."""
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
    """For any operations, positions, bytes and the best one are those of a plain list."""
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
