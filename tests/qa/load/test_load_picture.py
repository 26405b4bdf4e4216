"""Test that the picture shows answered and lost requests, and ends of the server."""

from __future__ import annotations

import pytest

from pyllamakv.view.drawing import Area, Mark, Text, svg
from qa.load.load_picture import draw
from qa.load.load_result import LoadResult, RequestTiming


def test_losses_and_aborts_are_drawn() -> None:
    """There is a panel per run; bars of equal height are equal counts."""
    good = tuple(RequestTiming(0.0, 1.0, float(n), 5) for n in range(1, 5)) * 5
    bad = (*good[:18], *(RequestTiming(0.0, 1.0, at, 0, "gone") for at in (3.0, 4.0)))
    stock, patched = LoadResult(bad, 1.0, 0, ((3.0, "SIGABRT"),)), LoadResult(good, 1.0)
    made = draw("0.3.9", {"stock": stock, "patched": patched})
    words = [each.text for each in made.items if isinstance(each, Text)]
    assert "stock: 18 of 20 requests answered, 2 lost; aborts of the server (crosses): 1" in words
    assert "patched: 20 of 20 requests answered" in words
    boxes = {(each.role, len(each.boxes)) for each in made.items if isinstance(each, Area)}
    assert boxes == {("s2", 4), ("bad", 2), ("bad", 0)}
    heights = [box[3] for each in made.items if isinstance(each, Area) for box in each.boxes]
    unit = min(heights)
    assert round(sum(heights) / unit) == 2 * len(good)
    (mark,) = [each for each in made.items if isinstance(each, Mark)]
    assert 500 < mark.x < 700
    assert svg(made).startswith("<svg")


def test_few_requests_have_bars_with_gaps() -> None:
    """Grey before the first token and in a long gap; a cross where a request was lost."""
    gaps = ((4.0, 4.1), (6.0, 10.0))
    run = LoadResult(
        (
            RequestTiming(2.0, 3.0, 12.0, 90, "", gaps),
            RequestTiming(2.0, 7.0, 7.0, 0, "RequestFailed: 500"),
        ),
        1.0,
    )
    made = draw("chats", {"stock": run})
    first, waits, second, late = (each for each in made.items if isinstance(each, Area))
    (whole,) = first.boxes
    before, between = waits.boxes
    assert [first.tip, second.tip] == ["90 tokens", "RequestFailed: 500"]
    assert round(before[2] / whole[2], 3) == 0.1
    assert round(between[2] / whole[2], 3) == 0.4
    assert late.boxes == second.boxes
    (cross,) = [each for each in made.items if isinstance(each, Mark)]
    assert cross.x == pytest.approx(whole[0] + whole[2] / 2)


def test_an_empty_run_is_drawn() -> None:
    """It causes no division by zero."""
    assert svg(draw("nothing", {"stock": LoadResult((), 0.0)}))
