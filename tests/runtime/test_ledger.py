"""Test the record of sequences against the reference model of cells."""

from __future__ import annotations

import hypothesis_profile  # noqa: F401
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyllamakv.errors import UsageError
from pyllamakv.runtime.ledger import Ledger
from pyllamakv.scenarios.cell_ledger import CellLedger

SEQUENCE = st.integers(0, 2)
BOUND = st.one_of(st.none(), st.integers(0, 30))


def bounds(p0: int | None, p1: int | None) -> tuple[int, int]:
    """Return bounds as the reference has them: negative ones are open."""
    return (-1 if p0 is None else p0), (-1 if p1 is None else p1)


class Cells(RuleBasedStateMachine):
    """Run the same operations on the ledgers of sequences and on the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = [Ledger() for _ in range(3)]
        self.reference = CellLedger()
        self.mark = 0

    @rule(seq=SEQUENCE, tokens=st.lists(st.integers(0, 99), max_size=5))
    def decode(self, seq: int, tokens: list[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            pos = self.reference.next(seq)
            self.reference.add([token], [pos], [[seq]])
            self.ledgers[seq].append(token, pos, self.mark)
            self.mark += 1

    @rule(seq=SEQUENCE, p0=BOUND, p1=BOUND)
    def remove(self, seq: int, p0: int | None, p1: int | None) -> None:
        """Remove a range."""
        before = len(self.reference.of(seq))
        self.reference.remove(seq, *bounds(p0, p1))
        assert self.ledgers[seq].remove(p0, p1) == before - len(self.reference.of(seq))

    @rule(src=SEQUENCE, dst=SEQUENCE, p1=BOUND)
    def fork(self, src: int, dst: int, p1: int | None) -> None:
        """Share the cells of another sequence with an empty one."""
        if len(self.ledgers[dst]) or src == dst:
            return
        self.reference.copy(src, dst, *bounds(None, p1))
        self.ledgers[dst].copy_from(self.ledgers[src], None, p1, share=True)

    @rule(seq=SEQUENCE, p0=BOUND, p1=BOUND, delta=st.integers(-10, 10))
    def shift(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Shift a range without shared cells and without a collision of positions."""
        low, high = p0 or 0, 10**9 if p1 is None else p1
        moving = [c.seqs for c in self.reference.cells if seq in c.seqs and low <= c.pos < high]
        others = set().union(*moving) - {seq}
        found = self.ledgers[seq].shared_with(enumerate(self.ledgers), p0, p1)
        assert set(found) == others
        try:
            self.ledgers[seq].check_move(p0, p1, delta)
        except UsageError:
            return
        self.reference.shift(seq, *bounds(p0, p1), delta)
        marks = self.ledgers[seq].marks_in(p0, p1)
        for other in found:
            self.ledgers[other].follow(marks, lambda p: p + delta)
        self.ledgers[seq].move(p0, p1, lambda p: p + delta)

    @invariant()
    def agree(self) -> None:
        """Compare tokens, positions and the next position of every sequence."""
        for seq, ledger in enumerate(self.ledgers):
            cells = zip(ledger.positions, ledger.tokens, strict=True)
            assert sorted(cells) == self.reference.of(seq)
            assert ledger.positions == sorted(ledger.positions)
            assert ledger.next == self.reference.next(seq)
            assert len(ledger.marks) == len(ledger)


TestCells = Cells.TestCase
TestCells.pytestmark = pytest.mark.slow


@pytest.mark.slow
@given(st.permutations(list(range(8))))
def test_positions_may_come_in_any_order(order: list[int]) -> None:
    """Check that entries are sorted by position."""
    ledger = Ledger()
    ledger.extend([100 + p for p in order], order, range(8))
    assert ledger.positions == list(range(8))
    assert ledger.tokens == [100 + p for p in range(8)]
    assert [order[mark] for mark in ledger.marks] == list(range(8))


def test_a_shift_onto_positions_that_stay_is_refused() -> None:
    """Check both neighbours and the start."""
    ledger = Ledger()
    ledger.extend([1, 2, 3, 4], [0, 1, 5, 9], [0, 1, 2, 3])
    ledger.check_move(5, 6, -3)
    for p0, p1, delta in ((5, 6, -4), (5, 6, 4), (0, 1, -1), (1, 6, 5)):
        with pytest.raises(UsageError, match="remove those tokens first"):
            ledger.check_move(p0, p1, delta)
    ledger.check_move(20, 30, -100)


def test_division_keeps_order_and_negative_positions_go() -> None:
    """Check the changes that llama.cpp makes to positions."""
    ledger = Ledger()
    ledger.extend([1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3])
    ledger.move(2, None, lambda p: p // 2)
    assert ledger.positions == [0, 1, 1, 1]
    ledger.move(None, 1, lambda p: p - 1)
    assert (ledger.tokens, ledger.next) == ([2, 3, 4], 2)
    ledger.clear()
    assert (ledger.tokens, ledger.next) == ([], 0)


def test_unshared_copy_has_no_shared_tokens() -> None:
    """Check that a copy between streams does not count as a fork."""
    first, second = Ledger(), Ledger()
    first.extend([1], [0], [7])
    second.copy_from(first, None, None, share=False)
    assert second.tokens == [1]
    assert first.shared_with(enumerate([first, second]), None, None) == ()


def test_first_moved_follows_shifts_removals_and_copies() -> None:
    """Shifts, removals and copies keep track of positions whose content equals a fresh decode."""
    ledger = Ledger()
    ledger.extend(range(10), range(10), range(10))
    assert (ledger.first_moved, ledger.moved) == (None, False)
    ledger.remove(4, 6)
    ledger.move(6, None, lambda p: p - 2)
    assert (ledger.first_moved, ledger.next, ledger.moved) == (4, 8, True)
    fork, head, tail = Ledger(), Ledger(), Ledger()
    fork.copy_from(ledger, None, None, share=True)
    head.copy_from(ledger, None, 4, share=True)
    tail.copy_from(ledger, 3, None, share=False)
    assert (fork.first_moved, head.first_moved, tail.first_moved) == (4, None, 1)
    ledger.move(20, None, lambda p: p + 1)
    ledger.remove(1, 2)
    assert ledger.first_moved == 3
    ledger.remove(2, 6)
    assert ledger.first_moved == 1
    ledger.remove(3, None)
    assert ledger.first_moved is None
    # A sibling that moved cells moves these as well.
    fork.follow({2, 3}, lambda p: p)
    assert fork.first_moved == 2
    fork.clear()
    assert not fork.moved
