"""Lay a timeline out: which operations share a column, where each column and each cell stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby

from pyllamakv.scenarios.cell_picture import Picture, most_frequent
from pyllamakv.scenarios.frames import Film, Frame

#: Room around the cells: on the left for their numbers, on the right, above for the marks.
LEFT, RIGHT, TOP = 52.0, 20.0, 74.0
#: Width of the plot, and of a column in it.
_NARROW, _WIDE, _COLUMN = 440.0, 860.0, 72.0
#: Height of the cells, and most rows that they get.
_HEIGHT, _ROWS = 256, 320
#: Most columns; in a longer film several operations share one.
_COLUMNS = 400


@dataclass(frozen=True)
class Column:
    """Hold what one column shows: the last of its frames, and what happened in any of them."""

    frames: tuple[Frame, ...]

    @property
    def picture(self) -> Picture:
        """Return the cells as the last of the frames left them."""
        return self.frames[-1].picture

    @property
    def failed(self) -> bool:
        """Tell whether any of the operations failed."""
        return any(frame.failed for frame in self.frames)

    @property
    def moved(self) -> int:
        """Count the cells that moved."""
        return sum(frame.moved for frame in self.frames)


@dataclass(frozen=True)
class Plot:
    """Say where the cells of each column are painted."""

    columns: tuple[Column, ...]
    cells: int
    width: float
    step: int
    cell: float

    @property
    def gap(self) -> float:
        """Return the room between columns, in which bands show where cells went."""
        share = self.width / len(self.columns)
        return min(0.38 * share, 48.0) if share >= 24 else 1.0 if share >= 10 else 0.0

    @property
    def pitch(self) -> float:
        """Return how far it is from one column to the next."""
        return (self.width + self.gap) / len(self.columns)

    @property
    def height(self) -> float:
        """Return the height of all cells."""
        return self.cells * self.cell

    @property
    def bottom(self) -> float:
        """Return where cell 0 begins."""
        return TOP + self.height

    def left(self, number: int) -> float:
        """Return a column's left edge."""
        return LEFT + number * self.pitch

    def right(self, number: int) -> float:
        """Return a column's right edge."""
        return self.left(number) + self.pitch - self.gap

    def middle(self, number: int) -> float:
        """Return a column's middle."""
        return (self.left(number) + self.right(number)) / 2

    def y(self, cell: float) -> float:
        """Return the height of a cell's lower edge; cell 0 lies at the bottom."""
        return self.bottom - cell * self.cell


def lay_out(film: Film) -> Plot:
    """Return where a film's columns and cells stand."""
    share = -(-len(film) // _COLUMNS)
    columns = tuple(
        Column(tuple(film.frames[at : at + share])) for at in range(0, len(film), share)
    )
    width = min(_WIDE, max(_NARROW, len(columns) * _COLUMN))
    step = max(1, -(-film.cells // _ROWS))
    rows = -(-film.cells // step)
    return Plot(columns, film.cells, width, step, max(1, _HEIGHT // rows) / step)


def ticks(cells: int, most: int = 5) -> list[int]:
    """Return round numbers from 0 to ``cells``: powers of two, as caches are sized."""
    if cells < most:
        return list(range(cells + 1))
    step = 1
    while cells / step >= most:
        step *= 2
    ticks = list(range(0, cells + 1, step))
    if cells - ticks[-1] >= step / 2:
        ticks.append(cells)
    return ticks


def round_step(width: float) -> int:
    """Return the round number of lines, each ``width`` wide, after which a label has room."""
    steps: Iterator[int] = (times * 10**power for power in count() for times in (1, 2, 5))
    return next(step for step in steps if step * width >= 44)


def runs_of(picture: Picture, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, first cell, cells) of each run of rows with one owner."""
    owners = picture.owner
    rows = [
        (
            owners[at]
            if step == 1
            else most_frequent(owners[at : at + step])
        )
        for at in range(0, len(owners), step)
    ]  # fmt: skip
    at = 0
    for owner, run in groupby(rows):
        length = min(len(list(run)) * step, len(owners) - at)
        yield owner, at, length
        at += length
