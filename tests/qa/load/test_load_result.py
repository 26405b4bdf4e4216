"""Test that a result counts complete responses, and is saved and loaded."""

from __future__ import annotations

import json
import math

import pytest

from qa.load.load_result import LoadResult, RequestTiming, percentiles

RESULT = LoadResult(
    (
        RequestTiming(0.0, 1.0, 2.0, 11, gaps=((1.0, 1.5),)),
        RequestTiming(1.0, 1.5, 4.0, 1),
        RequestTiming(2.0, 2.5, 5.0, 7, "ConnectionError: gone"),
    ),
    cpu_seconds=6.0,
    retries=2,
    deaths=((5.0, "SIGABRT"),),
    day="2026-01-02",
)


def test_lost_requests_have_no_latency_and_tokens() -> None:
    """Lost requests have no latency, and their tokens do not count."""
    assert (RESULT.lost, RESULT.tokens, RESULT.seconds) == (1, 12, 5.0)
    assert RESULT.tokens_per_second == pytest.approx(2.4)
    assert RESULT.cpu_per_token == pytest.approx(0.5)
    assert RESULT.first_token == (1.0, 0.5)
    assert RESULT.per_token == (0.1,)


def test_a_result_is_read_again() -> None:
    """The loaded result is equal."""
    assert LoadResult.from_json(json.loads(json.dumps(RESULT.to_json()))) == RESULT
    with pytest.raises(KeyError):
        LoadResult.from_json({})


def test_percentiles_of_an_empty_tuple_are_nan() -> None:
    """They are NaN."""
    assert percentiles(tuple(map(float, range(101)))) == (50.0, 95.0, 99.0)
    assert all(map(math.isnan, percentiles(())))


def test_empty_run_has_no_rate() -> None:
    """It causes no division by zero."""
    empty = LoadResult((), 0.0)
    assert (empty.lost, empty.tokens_per_second) == (0, 0.0)
    assert math.isnan(empty.cpu_per_token)
