"""Test the ledger, which models the content of a cache without cell indexes."""

from __future__ import annotations

from collections import Counter

from pyllamakv.scenarios.cell_ledger import CellLedger, cell_differences, reusable_cells


def filled(**seqs: int) -> CellLedger:
    ledger = CellLedger()
    for name, count in seqs.items():
        seq = int(name[1:])
        ledger.add(range(count), range(count), [[seq]] * count)
    return ledger


def test_removal_keeps_shared_cells() -> None:
    """A shared cell stays with its other owners."""
    ledger = filled(s0=4)
    ledger.copy(0, 1, 0, 2)
    ledger.remove(0)
    assert ledger.used == 2
    assert ledger.of(1) == [(0, 0), (1, 1)]
    assert ledger.next(1) == 2
    assert ledger.next(0) == 0


def test_ledger_treats_negative_bounds_as_open() -> None:
    """Negative bounds are open, as in llama.cpp."""
    ledger = filled(s0=6)
    ledger.remove(0, 4)
    assert ledger.used == 4
    ledger.remove(0, -1, 1)
    assert [pos for pos, _ in ledger.of(0)] == [1, 2, 3]
    ledger.remove(-1)
    assert ledger.used == 0


def test_a_shift_below_zero_frees_the_cell() -> None:
    """llama.cpp drops such cells, also if other sequences own them."""
    ledger = filled(s0=4)
    ledger.shift(0, -1, -1, -2)
    assert ledger.of(0) == [(0, 2), (1, 3)]


def test_ledger_keeps_divides_clears_and_replaces() -> None:
    """The less common operations equal those of llama.cpp."""
    ledger = filled(s0=2, s1=4)
    ledger.keep(1)
    assert ledger.sequences == [1]
    ledger.divide(1, 2, -1, 2)
    assert [pos for pos, _ in ledger.of(1)] == [0, 1, 1, 1]
    ledger.replace(1, [(5, 9)])
    assert ledger.of(1) == [(5, 9)]
    ledger.clear()
    assert not ledger.cells


def test_cell_differences_distinguish_lost_and_surplus_cells() -> None:
    """Missing and surplus cells are distinguished and named."""
    expected = Counter({(0, (0,)): 1, (1, (0, 1)): 1})
    found = Counter({(0, (0,)): 1, (7, (2,)): 1})
    lost, ghosts, text = cell_differences(expected, found)
    assert (lost, ghosts) == (1, 1)
    assert "position 1 of sequence 0+1" in text
    assert "position 7 of sequence 2" in text
    assert cell_differences(expected, expected) == (0, 0, "")


def test_only_unshared_cells_before_the_window_are_reusable() -> None:
    """The next token, at position 10, sees positions 7 to 9 with a window of 4."""
    ledger = filled(s0=10)
    assert reusable_cells(ledger.contents(), 16, 4) == 16 - 3
    ledger.copy(0, 1, 5, 8)
    assert reusable_cells(ledger.contents(), 16, 4) == 16 - 3 - 2
    ledger.remove(0)
    assert reusable_cells(ledger.contents(), 16, 4) == 16 - 3
    assert reusable_cells(CellLedger().contents(), 16, 4) == 16


def test_discarded_cells_leave_all_sequences() -> None:
    """Only the given cells are removed."""
    ledger = filled(s0=3)
    ledger.copy(0, 1)
    ledger.discard(ledger.cells[1:2])
    assert ledger.of(0) == ledger.of(1) == [(0, 0), (2, 2)]
