"""Test the arithmetic of benchmarks."""

from __future__ import annotations

import pytest

from qa.bench import measure


def test_confidence_interval_contains_the_median() -> None:
    """The bounds enclose the median, and are equal to it if all values are equal."""
    found = measure.interval([float(n) for n in range(101)])
    assert found.low <= found.median == 50 <= found.high
    assert found.high - found.low < 60
    same = measure.interval([2.0] * 40)
    assert (same.low, same.median, same.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="nothing"):
        measure.interval([])


def test_an_interval_shows_the_side_of_one() -> None:
    """Rounded bounds are 1.0 only if they are exactly; one value has no interval."""
    assert measure.Interval(1.01, 1.0004, 1.03, 30).format() == "1.0100 [1.0004, 1.0300]"
    assert measure.Interval(1.01, 1.0, 1.03, 30).format() == "1.01 [1.00, 1.03]"
    assert measure.interval([548.12]).format(1) == "548.1"


def test_interleave_runs_both_equally_often_and_swaps_the_order() -> None:
    """Neither side is always first, so neither has cold caches more often."""
    order: list[str] = []

    def first() -> float:
        order.append("a")
        return 2.0

    def second() -> float:
        order.append("b")
        return 1.0

    pairs = measure.interleave(first, second, pairs=4)
    assert order[2:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert pairs.ratio.median == 2.0
    assert pairs.difference.median == 1.0
