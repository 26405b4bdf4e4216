"""Test the drawing of a timeline: operations, cells, failures and moves."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_kit import frame, timeline

from pyllamakv.errors import UsageError
from pyllamakv.scenarios.cell_picture import FREE
from pyllamakv.scenarios.frames import Timeline
from pyllamakv.view import drawing, timeline_drawing
from pyllamakv.view.drawing import Area, Band, Mark, Text

SVG = "{http://www.w3.org/2000/svg}"


def areas(made: drawing.Drawing) -> dict[str, float]:
    """Return the area of each role's cells, without legend and strip."""
    top, bottom = 88.0, 88.0 + 4 * 64
    covered: dict[str, float] = {}
    for item in made.items:
        if isinstance(item, Area):
            for _, y, width, height in item.boxes:
                if top <= y < bottom:
                    covered[item.role] = covered.get(item.role, 0) + width * height
    return covered


def test_each_cell_of_each_operation_is_painted_once() -> None:
    """The area of every role is that of its cells, and together they cover everything."""
    made = timeline_drawing.paint(timeline())
    covered = areas(made)
    whole = sum(covered.values())
    cells = {role: round(20 * part / whole) for role, part in covered.items()}
    assert cells == {"s0": 2 + 2 + 2 + 2 + 1, "s1": 2, "s2": 2, "free": 6, "shared": 1}


def test_failures_and_moves_are_marked() -> None:
    """A failed operation has a cross above it; a move has a diamond and a band."""
    made = timeline_drawing.paint(timeline())
    marks = [item for item in made.items if isinstance(item, Mark)]
    assert [mark.kind for mark in marks] == ["diamond" if n else "cross" for n in (0, 1, 0, 1)]
    failed, moved = marks[:2]
    assert failed.x < moved.x
    (band,) = [item for item in made.items if isinstance(item, Band)]
    assert band.role == "s0"
    x1, top1, _, x2, top2, _ = band.edges[0]
    assert x1 < x2 and top1 < top2  # from cell 2 to cell 1


def test_timeline_has_labelled_axes_and_a_legend() -> None:
    """One axis has the cells, the other the operations, and each colour has a name."""
    drawn = [
        item.text for item in timeline_drawing.paint(timeline()).items if isinstance(item, Text)
    ]
    assert {"cells", "free", "0", "4", "decode", "remove", "defrag"} <= set(drawn)
    assert {"sequence 0", "sequence 1", "sequence 2", "shared", "failed"} <= set(drawn)
    assert "4 cells · 5 operations · 1 failed · 1 cells moved" in drawn


def test_timeline_svg_has_no_external_resources() -> None:
    """It is well formed, with tooltips, colours of both schemes and no external resources."""
    text = drawing.svg(timeline_drawing.paint(timeline()))
    root = ET.fromstring(text)
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert titles[0] == "a < b"
    assert "line 3: decode; no-slot\n2 of 4 cells used, 2 holes, largest 1" in titles
    assert "prefers-color-scheme:dark" in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    used = set(re.findall(r'class="([fl]-\w+)"', text))
    assert all(f".{name}{{" in text for name in used)


def test_embedded_timeline_svg_has_no_style() -> None:
    """Inside a page, a drawing has neither style rules nor a background."""
    text = drawing.svg(timeline_drawing.paint(timeline()), inside=True)
    assert "<style" not in text and "f-paper" not in text


@pytest.mark.slow
def test_long_timeline_has_a_bounded_size() -> None:
    """Thousands of operations and cells share columns and rows; marks are kept."""
    frames = [frame(n, [n % 3] * n + [FREE] * (4000 - n)) for n in range(1, 2001)]
    frames[777] = frame(778, [1] * 778 + [FREE] * (4000 - 778), failed="no-slot")
    made = timeline_drawing.paint(Timeline("long", frames))
    assert made.width < 1000 and made.height < 600
    assert sum(isinstance(item, Mark) for item in made.items) == 2  # in the plot and the legend
    assert len(drawing.svg(made)) < 400_000


def test_timeline_without_cells_is_refused() -> None:
    """A trace without snapshots is refused with a remedy."""
    with pytest.raises(UsageError, match="`pyllamakv trace record SCRIPT"):
        timeline_drawing.paint(Timeline("empty"))


@given(st.integers(1, 100_000))
def test_ticks_are_few_and_round(cells: int) -> None:
    """The axis has a few ascending numbers, the last one near the end, for any size."""
    found = timeline_drawing.ticks(cells)
    assert 2 <= len(found) <= 6 and found[0] == 0 and found[-1] > cells / 2
    assert all(one < other for one, other in pairwise(found))


@given(st.lists(st.lists(st.integers(-2, 12), min_size=6, max_size=6), min_size=1, max_size=40))
def test_random_timelines_are_drawn_inside_their_bounds(owners: list[list[int]]) -> None:
    """The drawing is well formed and within its size for any cells."""
    made = timeline_drawing.paint(
        Timeline("any", [frame(n, each) for n, each in enumerate(owners, 1)])
    )
    ET.fromstring(drawing.svg(made))
    for item in made.items:
        if isinstance(item, Area):
            for x, y, width, height in item.boxes:
                assert x >= 0 and y >= 0 and width > 0
                assert x + width <= made.width + 0.01 and y + height <= made.height + 0.01


def texts(made: drawing.Drawing) -> list[str]:
    """Return the text in a drawing."""
    return [item.text for item in made.items if isinstance(item, Text)]


def test_failure_marks_have_token_counts() -> None:
    """A slot failure shows tokens and the largest hole, another failure its result."""
    hole = [0, FREE, FREE, 0]
    frames = [frame(1, hole, failed="no-slot", tokens=3), frame(2, hole, failed="aborted")]
    drawn = texts(timeline_drawing.paint(Timeline("x", frames)))
    assert "3 tokens, largest hole 2" in drawn
    assert "aborted" in drawn
    assert frames[0].caption() == "decode; no-slot: 3 tokens, largest hole 2"


def test_labels_of_neighbours_do_not_overlap() -> None:
    """In a long timeline, a label that would cover the previous one is omitted."""
    frames = [frame(n, [0, FREE], failed="no-slot", tokens=3) for n in range(1, 101)]
    made = timeline_drawing.paint(Timeline("x", frames))
    labels = [i for i in made.items if isinstance(i, Text) and i.text.startswith("3 tokens")]
    assert 1 < len(labels) < 100
    width = 11 * 0.55 * len(labels[0].text)
    assert all(other.x - one.x > width for one, other in pairwise(labels))


def test_interleaved_cells_are_drawn_by_share() -> None:
    """Narrow stripes are replaced by a bar of each owner's share; wide runs are exact."""
    striped = [0, 1, 1, 1] * 256 + [FREE] * 1024
    made = timeline_drawing.paint(Timeline("x", [frame(1, striped)]))
    bars: dict[str, list[drawing.Box]] = {}
    for item in made.items:
        if isinstance(item, Area) and item.role in ("s0", "s1"):
            bars.setdefault(item.role, []).extend(b for b in item.boxes if b[2] > 100)
    one, other = bars["s0"], bars["s1"]
    assert len(one) == len(other) == -(-1024 // 36)  # 9 rows of 4 cells
    assert all(a[3] * 3 == pytest.approx(b[3]) for a, b in zip(one, other, strict=True))
    assert "A bar shows 36 interleaved cells: each owner's share of them." in texts(made)
    blocks = [0] * 512 + [1] * 512 + [FREE] * 1024
    solid = timeline_drawing.paint(Timeline("x", [frame(1, blocks)]))
    assert not any(drawn.startswith("A bar shows") for drawn in texts(solid))


def test_interleaved_owners_alternate_in_every_column() -> None:
    """No owner fills a block, even if adjacent bars of a long timeline are equal."""
    owner = [FREE] * 4096
    frames = []
    for n in range(300):
        owner[2 * n : 2 * n + 2] = [0, 1]
        frames.append(frame(n + 1, list(owner)))
    made = timeline_drawing.paint(Timeline("x", frames))
    bottom = max(y + h for i in made.items if isinstance(i, Area) for _, y, _, h in i.boxes) / 2
    for role in ("s0", "s1"):
        boxes = [b for i in made.items if isinstance(i, Area) and i.role == role for b in i.boxes]
        assert len(boxes) > 30 and max(height for _, y, _, height in boxes if y < bottom) < 8


def test_cells_that_were_never_used_are_left_out() -> None:
    """The axis ends above the highest used cell, with a note; the strip shows all cells."""
    made = timeline_drawing.paint(Timeline("x", [frame(1, [0] * 600 + [FREE] * 3496)]))
    assert {"640", "Cells 640 to 4095 were never used and are not drawn."} <= set(texts(made))
    assert texts(made).count("4096") == 1  # at the strip
    for owner in ([0] * 60 + [FREE] * 4, [FREE] * 64, [FREE] * 63 + [1]):
        drawn = texts(timeline_drawing.paint(Timeline("x", [frame(1, owner)])))
        assert "64" in drawn and not any(each.startswith("Cells ") for each in drawn)


def test_operations_without_cells_show_how_many_are_used() -> None:
    """Their columns have the height of the used cells, and no owner or largest hole."""
    frames = [
        frame(1, [FREE] * 64, counted=16),
        frame(2, [FREE] * 64, counted=48, failed="no-slot", tokens=20),
        frame(3, [0] * 24 + [FREE] * 40, "remove"),
    ]
    made = timeline_drawing.paint(Timeline("x", frames))
    (counted,) = [i for i in made.items if isinstance(i, Area) and i.role == "counted"][:1]
    one, other = counted.boxes
    assert other[3] == pytest.approx(3 * one[3])
    drawn = texts(made)
    assert (
        "2 of 3 operations recorded no cells: the height shows how many are used, not which."
        in drawn
    )
    assert {"used, sequence not recorded", "no-slot"} <= set(drawn)
    titles = [item.text for item in made.items if isinstance(item, drawing.Tooltip)]
    assert "16 of 64 cells used; which was not recorded" in titles[0]
    holes = [i for i in made.items if isinstance(i, Area) and i.role == "hole"]
    assert len(holes[0].boxes) == 1
    assert "used, sequence not recorded" not in texts(timeline_drawing.paint(timeline()))
