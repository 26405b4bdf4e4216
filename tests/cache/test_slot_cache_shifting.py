"""Test how many tokens are discarded when a sequence is full; groups are not split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.cache import token_groups
from pyllamakv.cache.slot_cache import head, shift_discard, truncate
from pyllamakv.errors import UsageError


@pytest.mark.parametrize(
    ("size", "keep", "length", "discard"),
    [
        (2048, 5, 2048, 1021),
        (2048, 2047, 2048, 1),
        (2048, 0, 2048, 1024),
        (2048, 5, 5000, 3973),
        (2048, 2047, 5000, 2953),
        (2048, 5, 512, 0),
        (10, 2, 10, 4),
    ],
)
def test_shift_discard_equals_that_of_ollama(
    size: int, keep: int, length: int, discard: int
) -> None:
    """The numbers are those of ollama's tests."""
    assert shift_discard(size, keep, length) == discard


@pytest.mark.parametrize(
    ("size", "keep", "length", "together", "discard"),
    [
        (2048, 5, 2048, [(1024, 1536)], 1531),
        (2048, 5, 2048, [(10, 522)], 1021),
        (32, 0, 32, [(0, 10), (10, 20)], 20),
        (32, 0, 32, [(4, 14), (14, 24)], 24),
    ],
)
def test_a_group_is_discarded_as_a_whole(
    size: int, keep: int, length: int, together: list[tuple[int, int]], discard: int
) -> None:
    """Check groups in the middle, near the start, and adjacent ones."""
    assert shift_discard(size, keep, length, together) == discard


def test_shift_discards_the_requested_number_after_the_head() -> None:
    """More than half is discarded if more is requested, and never the head."""
    assert shift_discard(10, 2, 10, wanted=7) == 7
    assert shift_discard(10, 2, 6, wanted=7) == 3
    assert shift_discard(10, 9, 4, wanted=7) == 0


def test_kept_head_contains_whole_groups_and_leaves_room() -> None:
    """The head is extended to the end of a group, or reduced if that is everything."""
    assert head(10, 4) == 4
    assert head(10, 99) == 9
    assert head(10, -1) == 0
    assert head(10, 4, [(2, 6)]) == 6
    assert head(10, 4, [(2, 10)]) == 2


def test_a_long_prompt_is_cut_behind_its_head() -> None:
    """The head and the newest tokens are kept; a group at the cut is discarded as a whole."""
    assert truncate(range(12), 3, 8) == ([0, 1, 2, 7, 8, 9, 10, 11], ())
    assert truncate(range(5), 3, 8) == ([0, 1, 2, 3, 4], ())
    assert truncate(range(12), 3, 8, [(6, 9)]) == ([0, 1, 2, 9, 10, 11], ())
    assert truncate(range(12), 3, 8, [(1, 4), (9, 11)]) == (
        [0, 1, 2, 3, 8, 9, 10, 11], ((1, 4), (5, 7)),
    )  # fmt: skip
    # The first kept token counts, also if all tokens fit.
    assert truncate(range(12), 99, 8) == ([0, 1, 2, 3, 4, 5, 6, 11], ())


def test_prompt_without_a_fitting_group_is_refused() -> None:
    """A group at the end that does not fit leaves nothing to evaluate."""
    with pytest.raises(UsageError, match="the group at its end would be removed"):
        truncate(range(12), 3, 8, [(4, 12)])


@pytest.mark.parametrize("wrong", [[(3, 3)], [(4, 2)], [(-1, 2)], [(5, 11)], [(0, 4), (3, 6)]])
def test_invalid_token_groups_are_refused(wrong: list[tuple[int, int]]) -> None:
    """Empty, reversed, out of range, overlapping."""
    with pytest.raises(UsageError):
        token_groups.checked(wrong, 10, 10)
    with pytest.raises(UsageError, match="at most 3"):
        token_groups.checked([(0, 4)], 10, 3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, tuple[token_groups.Group, ...]]:
    """Return size, keep, length and groups."""
    size = draw(st.integers(2, 24))
    length = draw(st.integers(1, 40))
    edges = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    pairs = list(itertools.pairwise(edges))
    found = tuple(pair for pair in pairs if draw(st.booleans()))
    return size, draw(st.integers(0, size - 1)), length, found


@given(cases(), st.integers(0, 5))
def test_shift_discard_agrees_with_brute_force(case: tuple, wanted: int) -> None:
    """The fewest tokens after the head are discarded that free enough and split no group."""
    size, keep, length, found = case
    keep = min(head(size, keep, found), length)
    wanted = min(wanted, size - keep)
    discard = shift_discard(size, keep, length, found, wanted=wanted)
    assert 0 <= discard <= length - keep
    target = max((size - keep) // 2, 1, wanted)
    whole = [n for n in range(length - keep + 1) if token_groups.around(found, keep + n) is None]
    enough = [n for n in whole if size - (length - n) >= target]
    assert discard == (min(enough) if enough else length - keep)


@given(cases())
def test_truncated_prompts_fit_and_keep_their_groups(case: tuple) -> None:
    """The result is a head and a tail of the prompt, and the groups have the same tokens."""
    size, keep, length, found = case
    try:
        tokens, together = truncate(range(length), keep, size, found)
    except UsageError:
        assert any(end == length for _, end in found)
        return
    assert 0 < len(tokens) <= size
    assert tokens[-1] == length - 1
    for first, end in together:
        assert tokens[first:end] == list(range(tokens[first], tokens[first] + end - first))
        assert (tokens[first], tokens[first] + end - first) in found
