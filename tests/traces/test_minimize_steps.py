"""Test that minimization finds minimal lists for any cause of a failure."""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.traces.minimize import Minimizer, Sizes

#: An item is a name and a size.
Item = tuple[str, int]


def join(one: Item, other: Item) -> Item | None:
    return (one[0], one[1] + other[1]) if one[0] == other[0] else None


SIZES: Sizes[Item] = Sizes(lambda item: item[1], lambda item, n: (item[0], n), join)
NEVER: Sizes[Item] = Sizes(lambda item: 0, lambda item, n: item, lambda one, other: None)

NAMES = "abcd"
ITEMS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 9)), max_size=14)


def sums(items: tuple[Item, ...]) -> dict[str, int]:
    return {name: sum(n for each, n in items if each == name) for name in NAMES}


@given(ITEMS, st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9)))
def test_minimizing_keeps_exactly_the_required_items(
    items: list[Item], need: dict[str, int]
) -> None:
    """A failure that needs an amount of each name keeps exactly that, in the fewest items."""

    def fails(some: tuple[Item, ...]) -> bool:
        return all(sums(some)[name] >= n for name, n in need.items())

    if not fails(tuple(items)):
        return
    best = Minimizer(items, fails, SIZES).run()
    assert sums(best) == {**dict.fromkeys(NAMES, 0), **need}
    assert all(one[0] != two[0] for one, two in pairwise(best))


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), unique=True, max_size=16), st.data())
def test_minimizer_finds_the_failing_subset(values: list[int], data: st.DataObject) -> None:
    """Delta debugging on plain items finds the failing items, in order."""
    guilty = data.draw(st.sets(st.sampled_from(values))) if values else set()
    items = [("a", value) for value in values]
    found = Minimizer(items, lambda some: guilty <= {n for _, n in some}, NEVER).run()
    assert [n for _, n in found] == [n for n in values if n in guilty]


@given(ITEMS, st.integers(0, 2**16))
def test_the_result_is_minimal_for_any_failure(items: list[Item], seed: int) -> None:
    """Checked by brute force: no item can be omitted or reduced by one."""
    asked: dict[tuple[Item, ...], bool] = {tuple(items): True}

    def fails(some: tuple[Item, ...]) -> bool:
        # Arbitrary, but deterministic.
        return asked.setdefault(some, crc32(repr((some, seed)).encode()) % 3 == 0)

    reports: list[tuple[Item, ...]] = []
    shrinker = Minimizer(items, fails, SIZES, reports.append)
    best = shrinker.run()
    assert fails(best)
    for place, (name, n) in enumerate(best):
        assert not fails((*best[:place], *best[place + 1 :]))
        if n > 1:
            assert not fails((*best[:place], (name, n - 1), *best[place + 1 :]))
    assert not reports or reports[-1] == best
    assert shrinker.runs < len(asked)


def test_minimizer_tests_no_list_twice() -> None:
    """Each list is played once, because runs are expensive."""
    asked: list[tuple[Item, ...]] = []

    def fails(some: tuple[Item, ...]) -> bool:
        asked.append(some)
        return sums(some)["a"] >= 3

    shrinker = Minimizer([("a", 2), ("b", 5), ("a", 9), ("c", 1)], fails, SIZES)
    assert shrinker.run() == (("a", 3),)
    assert len(asked) == len(set(asked)) == shrinker.runs
