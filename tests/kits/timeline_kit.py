"""A short timeline for the tests of pictures."""

from __future__ import annotations

from pyllamakv.scenarios.cell_picture import FREE, SHARED, Picture
from pyllamakv.scenarios.frames import Frame, Timeline


def frame(number: int, owner: list[int], op: str = "decode", **more) -> Frame:
    return Frame(number, op, "", Picture("", tuple(owner)), **more)


def timeline() -> Timeline:
    """Return a run that scatters, fails, and defragments: four cells."""
    return Timeline(
        "a < b",
        [
            frame(1, [0, 1, 0, 1]),
            frame(2, [0, FREE, 0, FREE], "remove"),
            frame(3, [0, FREE, 0, FREE], failed="no-slot"),
            frame(4, [0, 0, FREE, FREE], "defrag", moves=((2, 1, 1),), moved=1),
            frame(5, [SHARED, 0, 2, 2], "decode"),
        ],
    )
