"""Test copies and removals of a cache: shared cells, gaps, memories of states.

The names in docstrings are those of ollama's tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cache_kit import forward, picture, simulated

from pyllamakv.errors import KVCacheFull, SharedCells, Unsupported, UsageError

if TYPE_CHECKING:
    from pyllamakv.cache.context_cache import ContextCache


@pytest.fixture
def cache(tmp_path: Path) -> ContextCache:
    """Return a cache of 64 cells and 4 sequences."""
    return simulated(tmp_path)


def test_copy_replaces_the_tokens_of_the_target(cache: ContextCache) -> None:
    """The target's own tokens are removed, and the cells are shared."""
    forward(cache, 0, [1, 2, 3, 4])
    forward(cache, 1, [9] * 9)
    assert cache.copy_prefix(0, 1, 2) == 2
    assert cache.sequences[1].tokens == [1, 2]
    assert cache.context.kv.stats.shared == 2
    forward(cache, 1, [7, 8])
    assert cache.sequences[1].tokens == [1, 2, 7, 8]
    assert cache.sequences[0].tokens == [1, 2, 3, 4]
    cache.check()


def test_a_copy_to_itself_changes_nothing(cache: ContextCache) -> None:
    """An earlier cache cleared the sequence before the copy."""
    forward(cache, 0, [1, 2, 3, 4])
    before = picture(cache)
    assert cache.copy_prefix(0, 0, 2) == 2
    assert cache.copy_prefix(0, 0, 9) == 4
    assert picture(cache) == before


def test_copy_of_length_zero_clears_and_of_excess_copies_all(cache: ContextCache) -> None:
    """Length 0 clears the target, a length beyond the source copies all of it."""
    forward(cache, 0, [1, 2, 3])
    forward(cache, 1, [9])
    assert cache.copy_prefix(0, 1, 99) == 3
    assert cache.sequences[1].tokens == [1, 2, 3]
    assert cache.copy_prefix(0, 1, 0) == 0
    assert cache.length(1) == 0
    assert cache.copy_prefix(2, 0, 5) == 0
    assert cache.length(0) == 0
    with pytest.raises(UsageError, match="0 or more"):
        cache.copy_prefix(0, 1, -1)
    with pytest.raises(UsageError, match="out of range"):
        cache.copy_prefix(0, 4, 1)


def test_recurrent_memory_refuses_partial_copies(tmp_path: Path) -> None:
    """The refusal precedes any change of the target."""
    cache = simulated(tmp_path, {"partial": False})
    forward(cache, 0, [1, 2, 3])
    forward(cache, 1, [9])
    before = picture(cache)
    with pytest.raises(Unsupported, match="one state per sequence") as caught:
        cache.copy_prefix(0, 1, 2)
    assert "state" in caught.value.reason
    assert picture(cache) == before
    assert cache.copy_prefix(0, 1, 3) == 3


def test_a_removed_end_leaves_a_hole_that_is_used_again(cache: ContextCache) -> None:
    """TestRemove/RemoveEnd: later tokens are removed, and the next ones replace them."""
    forward(cache, 0, [1, 2, 3, 4, 5])
    cache.remove(0, 3)
    assert cache.sequences[0].tokens == [1, 2, 3]
    forward(cache, 0, [6, 7])
    assert cache.sequences[0].positions == [0, 1, 2, 3, 4]
    assert cache.context.kv.stats.used_max_p1 == 5
    cache.remove(0, 9)
    cache.remove(0, 5, 7)
    assert cache.length(0) == 5


def test_removed_middle_shifts_later_positions(cache: ContextCache) -> None:
    """TestRemove/RemoveMiddle: later positions are shifted, and the cache rotates their keys."""
    forward(cache, 0, [1, 2, 3, 4, 5, 6])
    cache.remove(0, 1, 3)
    assert (cache.sequences[0].tokens, cache.sequences[0].positions) == ([1, 4, 5, 6], [0, 1, 2, 3])
    assert cache.context.kv.snapshot().streams[0].shift.min() == -2
    cache.remove(0, 0, 2)
    assert cache.sequences[0].tokens == [5, 6]
    cache.remove(0, 1, 1)
    assert cache.sequences[0].tokens == [5, 6]
    cache.check()


def test_shared_cell_is_refused_before_any_shift(cache: ContextCache) -> None:
    """An earlier cache had shifted some cells before it reached the first shared one.

    In releases with one cache for all, a shift of a fork also shifted its sibling.
    """
    forward(cache, 0, range(10))
    cache.copy_prefix(0, 1, 8)
    before = picture(cache)
    with pytest.raises(SharedCells) as caught:
        cache.remove(0, 2, 4)
    assert caught.value.sequences == (1,)
    assert picture(cache) == before
    cache.remove(0, 7, 8)  # only positions 8 and 9 move, which are not shared
    assert cache.sequences[0].tokens == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert cache.sequences[1].tokens == list(range(8))
    cache.check()


def test_shift_with_own_cells_keeps_the_sibling(cache: ContextCache) -> None:
    """The sibling's bytes are unchanged."""
    forward(cache, 0, range(10))
    cache.copy_prefix(0, 1, 8)
    rows = cache.context.kv.rows(0, cache.sequences[1])
    cache.remove(0, 2, 4, unshare=True)
    assert cache.sequences[0].tokens == [0, 1, 4, 5, 6, 7, 8, 9]
    assert cache.sequences[1].tokens == list(range(8))
    after = cache.context.kv.rows(0, cache.sequences[1])
    assert (rows.k == after.k).all()
    assert (rows.v == after.v).all()
    assert cache.context.kv.stats.shared == 0
    cache.check()


def test_shift_without_free_cells_is_refused_before_changes(cache: ContextCache) -> None:
    """It is before anything is done."""
    forward(cache, 0, [1] * 30)
    cache.copy_prefix(0, 1, 30)
    forward(cache, 2, [2] * 20)
    before = picture(cache)
    with pytest.raises(KVCacheFull) as caught:
        cache.remove(0, 2, 4, unshare=True)
    assert (caught.value.wanted, caught.value.used) == (30, 50)
    assert picture(cache) == before


def test_a_memory_that_cannot_shift_refuses_the_middle(tmp_path: Path) -> None:
    """The error has the reason, nothing has changed, and a whole sequence can be removed."""
    cache = simulated(tmp_path, {"can_shift": False})
    forward(cache, 0, range(10))
    before = picture(cache)
    with pytest.raises(Unsupported, match="cannot shift positions") as caught:
        cache.remove(0, 2, 4)
    assert caught.value.reason.startswith("the memory of this context cannot shift positions: ")
    assert picture(cache) == before
    cache.remove(0, 8)
    cache.remove(0, 0)
    assert cache.length(0) == 0


def test_recurrent_memory_refuses_partial_removal(tmp_path: Path) -> None:
    """A removal at the end or in the middle returns the position to continue at."""
    cache = simulated(tmp_path, {"partial": False})
    forward(cache, 0, range(10))
    before = picture(cache)
    for begin, end in ((4, None), (2, 4), (0, 4)):
        with pytest.raises(Unsupported):
            cache.remove(0, begin, end)
        assert picture(cache) == before
    assert [p for p in range(12) if cache.can_resume(0, p)] == [0, 10]
    assert cache.prepare_restore(0, 7) == 0
    cache.remove(0, 0)
    assert cache.length(0) == 0
