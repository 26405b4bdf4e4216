"""Test statistics of cells, and the check for free slots, against loops."""

from __future__ import annotations

import hypothesis_profile  # noqa: F401
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_kit import CELLS, cell_map

from pyllamakv.runtime.snapshot import Snapshot


def holes_of(cells: list) -> list[tuple[int, int]]:
    """Find the holes cell by cell."""
    found: list[list[int]] = []
    for i, cell in enumerate(cells):
        if cell is not None:
            continue
        if found and sum(found[-1]) == i:
            found[-1][1] += 1
        else:
            found.append([i, 1])
    return [(a, b) for a, b in found]


@given(CELLS)
def test_statistics_agree_with_counting(cells: list) -> None:
    """Check every number of a stream against a loop."""
    snapshot = Snapshot((cell_map(cells),))
    stats, holes = snapshot.stats, holes_of(cells)
    used = [i for i, cell in enumerate(cells) if cell is not None]
    assert (stats.size, stats.used, stats.free) == (
        len(cells),
        len(used),
        len(cells) - len(used),
    )
    assert [tuple(hole) for hole in snapshot.streams[0].holes.tolist()] == holes
    assert stats.holes == len(holes)
    assert stats.largest_hole == max((n for _, n in holes), default=0)
    assert stats.used_max_p1 == (used[-1] + 1 if used else 0)
    assert stats.shared == sum(len(cell[1]) > 1 for cell in cells if cell)
    expected = 1 - stats.largest_hole / stats.free if stats.free else 0
    assert stats.fragmentation == pytest.approx(expected)
    assert 0 <= stats.fragmentation < 1


@given(CELLS)
def test_each_sequence_is_counted_as_a_loop_would(cells: list) -> None:
    """Check count, positions, spans and shared cells of every sequence."""
    per_sequence = Snapshot((cell_map(cells),)).stats.per_sequence
    present = sorted({seq for cell in cells if cell for seq in cell[1]})
    assert list(per_sequence) == present
    assert len(per_sequence) == len(present)
    for seq in present:
        mine = [i for i, cell in enumerate(cells) if cell and seq in cell[1]]
        stats = per_sequence[seq]
        assert stats.cells == len(mine) == per_sequence.counts[seq]
        assert stats.pos_min == min(cells[i][0] for i in mine)
        assert stats.pos_max == max(cells[i][0] for i in mine)
        assert stats.spans == sum(i - 1 not in mine for i in mine)
        assert stats.shared == sum(len(cells[i][1]) > 1 for i in mine)
    with pytest.raises(KeyError):
        per_sequence[131]


@given(CELLS, st.integers(0, 70))
def test_fits_agrees_with_a_search_for_slots(cells: list, n: int) -> None:
    """Check both kinds of slots against the holes."""
    holes = [length for _, length in holes_of(cells)]
    snapshot = Snapshot((cell_map(cells),), contiguous=True)
    assert snapshot.fits(n) == (n == 0 or max(holes, default=0) >= n)
    assert snapshot.fits(n, contiguous=False) == (sum(holes) >= n)
    assert Snapshot(snapshot.streams, contiguous=False).fits(n) == (sum(holes) >= n)


def test_counts_hold_for_more_cells_than_a_byte_counts() -> None:
    """Check that thousands of cells of one sequence are all counted."""
    cells = [(i, {0, 63, 64}) for i in range(3001)]
    counts = cell_map(cells).counts
    assert {i: int(n) for i, n in enumerate(counts) if n} == {0: 3001, 63: 3001, 64: 3001}


def test_snapshot_statistics_sum_streams_without_the_window() -> None:
    """Check two streams of a full cache with a sliding-window cache."""
    full = [
        cell_map([(0, {0}), None, None], stream=0),
        cell_map([(0, {1}), (1, {1}), None], stream=1),
    ]
    snapshot = Snapshot((*full, cell_map([None] * 9, swa=True)))
    assert (snapshot.stats.size, snapshot.stats.used, snapshot.stats.holes) == (6, 3, 2)
    assert snapshot.stats.used_max_p1 == 3
    assert snapshot.fits(2)
    assert snapshot.fits(2, stream=0)
    assert not snapshot.fits(2, stream=1)
    assert snapshot.streams[2].stats.size == 9


def test_statistics_go_into_json() -> None:
    """Check the plain data."""
    numbers = Snapshot((cell_map([None, (3, {2}), None]),)).stats.to_json()
    assert numbers["free"] == 2
    assert numbers["fragmentation"] == 0.5
    assert numbers["per_sequence"] == {"2": 1}
    assert numbers["holes"] == 2
