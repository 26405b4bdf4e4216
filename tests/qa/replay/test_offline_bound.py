"""Test that the bound is the best offline choice by brute force, and limits all policies."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.cache.eviction_policy import EvictionPolicyName
from qa.replay.offline_bound import most_reused, possible
from qa.replay.policy_replay import replay
from qa.replay.replayed_request import ReplayedRequest, share_of, unique_cells

REQUESTS = st.lists(
    st.builds(
        ReplayedRequest,
        st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
        st.lists(st.integers(0, 1), max_size=1).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


def best(requests: list[ReplayedRequest], capacity: int) -> int:
    """Try all sets of cells that may stay between two requests: prefixes of existing ones."""

    @cache
    def from_here(number: int, held: frozenset[tuple[int, ...]]) -> int:
        if number == len(requests):
            return 0
        each = requests[number]
        cells = [each.cells[: n + 1] for n in range(len(each.cells))]
        reused = 0
        while reused < len(each.prompt) - 1 and cells[reused] in held:
            reused += 1
        there = held | set(cells)
        return reused + max(from_here(number + 1, kept) for kept in _subsets(there, capacity))

    return from_here(0, frozenset())


def _subsets(cells: frozenset[tuple[int, ...]], size: int) -> set[frozenset[tuple[int, ...]]]:
    """Return the largest sets of at most ``size`` cells in which every cell has its parent."""
    if len(cells) <= size:
        return {cells}
    leaves = [c for c in cells if not any(o[:-1] == c for o in cells)]
    return set().union(*(_subsets(cells - {leaf}, size) for leaf in leaves))


@pytest.mark.slow
@given(REQUESTS, st.integers(3, 6))
def test_no_offline_choice_exceeds_the_bound(
    requests: list[ReplayedRequest], capacity: int
) -> None:
    """The brute force may exceed the capacity while a request is served."""
    found = best(requests, capacity)
    assert found <= most_reused(requests, capacity) <= possible(requests)


def test_the_bound_is_reached() -> None:
    """One of two prompts stays: the one that is used next, then the other."""
    a, b = ReplayedRequest((1, 1, 1)), ReplayedRequest((2, 2, 2))
    requests = [a, b, a, b]
    assert [most_reused(requests, n) for n in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert possible(requests) == 4
    assert best(requests, 4) == 4


def test_a_text_is_never_reused_while_it_is_generated() -> None:
    """The same response is decoded again, and so is its prompt except for one cell."""
    again = ReplayedRequest((1, 2), (3, 4))
    assert possible([again, again]) == 1
    assert possible([again, ReplayedRequest((1, 2, 3, 4, 5))]) == 4


@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_no_policy_exceeds_the_bound(policy: EvictionPolicyName) -> None:
    """Random prompts over a small alphabet, at several capacities."""
    draw = Random(5)
    requests = [
        ReplayedRequest(tuple(draw.randint(0, 2) for _ in range(draw.randint(1, 6))), (9,))
        for _ in range(60)
    ]
    for percent in (5, 20, 50):
        capacity = share_of(percent / 100, requests)
        result = replay(requests, capacity, policy)
        assert 0 < result.reused <= most_reused(requests, capacity)
    unlimited = replay(requests, unique_cells(requests), policy)
    assert (unlimited.reused, unlimited.evictions) == (possible(requests), 0)
