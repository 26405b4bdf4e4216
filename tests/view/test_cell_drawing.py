"""Test drawings of cells, which show the owner of each cell with and without colours."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.runtime.snapshot import CellMap, Snapshot
from pyllamakv.scenarios.cell_picture import FREE, SHARED, Picture
from pyllamakv.view import drawing
from pyllamakv.view.cell_drawing import draw, letter, paint, plain


def snapshot() -> Snapshot:
    pos = np.array([0, 1, -1, 0, -1, -1, 5, 6], dtype=np.int32)
    seqs = np.array([[1], [3], [0], [2], [0], [0], [1], [1 << 63]], dtype=np.uint64)
    return Snapshot((CellMap(pos, np.zeros(8, dtype=np.int32), seqs),))


def test_picture_shows_owner_shared_and_free_cells() -> None:
    """A cell has the mark of its only owner, of shared cells, or of free ones."""
    picture = Picture.of(snapshot(), "now")
    assert picture.owner == (0, SHARED, FREE, 1, FREE, FREE, 0, 63)
    assert picture.used == 5
    assert picture.holes == (2, 2)
    assert picture.caption() == "now: 5 of 8 cells used, 2 holes, largest 2"


def test_plain_picture_distinguishes_sequences_by_letters() -> None:
    """The letters distinguish the sequences."""
    lines = plain(Picture.of(snapshot()), width=4).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["0#·1", "··01"]
    assert "5 of 8" in lines[0]


def test_large_cache_is_drawn_with_several_cells_per_character() -> None:
    """A character is free only if all its cells are, and the size of the drawing is bounded."""
    picture = Picture("", tuple([FREE] * 3 + [7]) * 1000)
    step, shown = picture.scaled(100)
    assert step == 40
    assert set(shown) == {7}
    assert "40 cells to a place" in draw(picture, 10, 10).plain


def test_svg_is_well_formed_and_complete() -> None:
    """The cells of each owner are labelled, and labels are escaped."""
    text = drawing.svg(paint(Picture("a < b & c", (0, 0, FREE, SHARED)), columns=2))
    root = ET.fromstring(text)
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert names[1:] == ["shared", "free", "sequence 0"]
    assert "a < b & c" in (names[0] or "")
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[1:] == ["sequence 0", "shared", "free"]


def test_a_drawing_names_its_operation() -> None:
    """The operation is above the caption, and everything is inside the bounds of the drawing."""
    picture = Picture("", (0, 8, FREE) * 20)
    made = paint(picture, columns=16, heading="line 7: decode 0: 16 tokens; no-slot")
    texts = [item for item in made.items if isinstance(item, drawing.Text)]
    assert [text.text for text in texts] == [
        "line 7: decode 0: 16 tokens; no-slot", picture.caption(), "sequence 0, 8", "free",
    ]  # fmt: skip
    assert texts[0].y < texts[1].y < texts[2].y < made.height
    cells = [b for i in made.items if isinstance(i, drawing.Area) for b in i.boxes]
    assert min(y for _, y, _, _ in cells) > texts[1].y
    assert max(y + height for _, y, _, height in cells) <= made.height
    assert max(x + width for x, _, width, _ in cells) <= made.width


@given(st.lists(st.integers(-2, 70), max_size=200))
def test_picture_round_trips_through_json(owners: list[int]) -> None:
    """A snapshot is written and read as JSON, and its runs cover every cell."""
    picture = Picture("x", tuple(owners))
    assert Picture.from_json(picture.to_json()) == picture
    assert sum(length for _, length in picture.runs()) == len(owners)
    assert all(len(letter(owner)) == 1 for owner in owners)
