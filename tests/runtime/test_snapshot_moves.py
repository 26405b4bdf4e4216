"""Test that moves are found from positions and sequences alone."""

from __future__ import annotations

from collections import Counter

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_kit import CELLS, cell_map

from pyllamakv.runtime.snapshot import Moves, Snapshot, find_moves


def key(cell: tuple | None) -> tuple | None:
    """Return the properties that identify a used cell."""
    return None if cell is None else (cell[0], frozenset(cell[1]))


@given(CELLS, st.randoms(use_true_random=False))
def test_moves_of_a_permutation_are_all_found(cells: list, random) -> None:
    """Check that after any permutation every move leads to an equal cell, and none is missed."""
    order = list(range(len(cells)))
    random.shuffle(order)
    shuffled = [cells[i] for i in order]
    before, after = Snapshot((cell_map(cells),)), Snapshot((cell_map(shuffled),))
    moves = before.moves_to(after)
    assert moves.vanished == moves.appeared == 0
    for source, target in moves:
        assert key(cells[source]) == key(shuffled[target]) is not None
        assert source != target
    stays = sum(key(a) == key(b) is not None for a, b in zip(cells, shuffled, strict=True))
    assert len(moves) == sum(cell is not None for cell in cells) - stays
    assert len(set(moves.source.tolist())) == len(set(moves.target.tolist())) == len(moves)
    assert list(moves.source) == sorted(moves.source)


@pytest.mark.slow
@given(CELLS, CELLS)
def test_cells_without_a_counterpart_are_counted(old: list, new: list) -> None:
    """Check vanished and new cells against counts."""
    size = max(len(old), len(new))
    old, new = old + [None] * (size - len(old)), new + [None] * (size - len(new))
    moves = Snapshot((cell_map(old),)).moves_to(Snapshot((cell_map(new),)))
    left, right = Counter(map(key, filter(None, old))), Counter(map(key, filter(None, new)))
    assert moves.vanished == (left - right).total()
    assert moves.appeared == (right - left).total()


def test_runs_count_copies_of_neighbours() -> None:
    """Check that cells that move together are one run."""
    cells = [None, None, (0, {0}), (1, {0}), (2, {0}), None]
    moved = [(0, {0}), (1, {0}), None, None, None, (2, {0})]
    moves = Snapshot((cell_map(cells),)).moves_to(Snapshot((cell_map(moved),)))
    assert list(moves) == [(2, 0), (3, 1), (4, 5)]
    assert moves.runs == 2
    assert moves.pairs.tolist() == [[2, 0], [3, 1], [4, 5]]
    assert str(moves) == "3 cells moved in 2 runs"


def test_equal_cells_are_not_reported_as_moved() -> None:
    """Check that equal cells are not reported as moved."""
    cells = [(0, {0}), (0, {0}), None]
    moved = [(0, {0}), None, (0, {0})]
    moves = Snapshot((cell_map(cells),)).moves_to(Snapshot((cell_map(moved),)))
    assert list(moves) == [(1, 2)]


def test_streams_are_paired_one_by_one() -> None:
    """Check that a move names its stream, and runs do not cross streams."""
    a, b = [None, (0, {0})], [(0, {0}), None]
    before = Snapshot((cell_map(a), cell_map(a, stream=1)))
    after = Snapshot((cell_map(b), cell_map(b, stream=1)))
    moves = before.moves_to(after)
    assert moves.stream.tolist() == [0, 1]
    assert (moves.cells, moves.runs) == (2, 2)


def test_snapshots_of_other_shape_are_refused() -> None:
    """Check that two contexts cannot be compared."""
    with pytest.raises(ValueError, match="one context"):
        Snapshot((cell_map([None]),)).moves_to(Snapshot((cell_map([None, None]),)))


def test_empty_snapshots_have_no_moves() -> None:
    """Check the empty cases."""
    empty = np.empty(0, dtype=np.int32), np.empty((0, 1), dtype=np.uint64)
    moves = find_moves(*empty, *empty)
    assert not moves
    assert moves.runs == 0
    assert Moves.join([]).cells == 0
