"""Test that the picture shows answered and lost requests, and ends of the server."""

from __future__ import annotations

from pyllamakv.view.drawing import Area, Mark, Text, svg
from qa.load.load_picture import draw
from qa.load.load_result import LoadResult, RequestTiming


def test_losses_and_aborts_are_drawn() -> None:
    """A panel per run; bars of equal height are equal counts."""
    good = tuple(RequestTiming(0.0, 1.0, float(n), 5) for n in range(1, 5))
    bad = (*good[:2], RequestTiming(0.0, 1.0, 3.0, 0, "gone"), RequestTiming(0, 1, 4.0, 0, "gone"))
    stock, patched = LoadResult(bad, 1.0, 0, ((3.0, "SIGABRT"),)), LoadResult(good, 1.0)
    made = draw("0.3.9", {"stock": stock, "patched": patched})
    words = [each.text for each in made.items if isinstance(each, Text)]
    assert "stock: 2 of 4 requests answered, 2 lost; aborts of the server (crosses): 1" in words
    assert "patched: 4 of 4 requests answered" in words
    boxes = {(each.role, len(each.boxes)) for each in made.items if isinstance(each, Area)}
    assert boxes == {("s2", 2), ("bad", 2), ("s2", 4), ("bad", 0)}
    heights = {box[3] for each in made.items if isinstance(each, Area) for box in each.boxes}
    assert len(heights) == 1
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
