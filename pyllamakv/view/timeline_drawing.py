"""Draw a timeline: operations to the right, cells upward, one colour per sequence.

Bands between two columns connect the old and new places of cells that moved. Above a column, a
cross with its numbers marks a failed operation, and a diamond marks moved cells. The strip below
shows the free cells and the largest hole, which limits a batch that needs contiguous cells.

Runs of cells are drawn exactly while they are higher than `_BLUR` on average. Where sequences
interleave more finely, stripes would blur into each other, so a bin of cells is drawn as density:
its height is divided among the owners by their share of the cells. Heights remain visible where
columns are narrow or equal bins are side by side; parts of a width would become solid blocks.

Operations that recorded no cells show how many are used. Cells above the highest one that was used
are not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

from pyllamakv.errors import UsageError
from pyllamakv.scenarios.cell_picture import FREE, Picture, most_frequent, shares
from pyllamakv.scenarios.frames import Frame, Timeline
from pyllamakv.view import drawing, palette
from pyllamakv.view.drawing import LETTER, Area, Band, Box, Drawing, Mark, Segment, Text, Tooltip

#: Margins around the cells: on the left for numbers, on the right, and above for marks.
LEFT, RIGHT, TOP = 60.0, 20.0, 88.0
#: Width of the plot, and of a column in it.
_NARROW, _WIDE, _COLUMN = 440.0, 860.0, 72.0
#: Height of the cells, and most rows that they get.
_HEIGHT, _ROWS = 256, 320
#: Runs that are at most this high on average blur into each other: two pixels of a screen.
_BLUR = 2.0
#: Height of a bin that is drawn as density, at least, and for each owner: low enough for the
#: shape, high enough for the shares.
_BIN, _SHARE = 8.0, 3.0
#: Most owners whose shares a bin has room for.
_SHARES = 8
#: Most columns; in a longer timeline several operations share one.
_COLUMNS = 400
#: Height of the numbers below the cells.
_STRIP = 48.0
#: Maximum number of operations with names below them.
_NAMED = 32


@dataclass(frozen=True)
class Column:
    """The content of one column: its last frame, and the events of all its frames."""

    frames: tuple[Frame, ...]

    @property
    def picture(self) -> Picture:
        """Return the cells after the last frame."""
        return self.frames[-1].picture

    @property
    def counted(self) -> int | None:
        """Return the number of used cells if it is all that is known of them."""
        return self.frames[-1].counted

    @property
    def failed(self) -> bool:
        """Return whether any of the operations failed."""
        return any(frame.failed for frame in self.frames)

    @property
    def failure(self) -> str:
        """Return why the first failed operation failed; empty if none failed."""
        return next((frame.failure for frame in self.frames if frame.failed), "")

    @property
    def moved(self) -> int:
        """Count the cells that moved."""
        return sum(frame.moved for frame in self.frames)


@dataclass(frozen=True)
class Plot:
    """The layout of the ``cells`` that are drawn in each column; the cache has ``total``."""

    columns: tuple[Column, ...]
    cells: int
    total: int
    owners: int
    width: float
    step: int
    cell: float

    @property
    def bin(self) -> int:
        """Return the number of cells in a bin: a whole number of rows."""
        height = max(_BIN, _SHARE * min(self.owners, _SHARES))
        return max(1, round(height / (self.cell * self.step))) * self.step

    @property
    def unknown(self) -> int:
        """Count the operations that recorded no cells."""
        return sum(frame.counted is not None for each in self.columns for frame in each.frames)

    @property
    def gap(self) -> float:
        """Return the space between columns, in which bands show moves."""
        share = self.width / len(self.columns)
        return min(0.38 * share, 48.0) if share >= 24 else 1.0 if share >= 10 else 0.0

    @property
    def pitch(self) -> float:
        """Return the distance between two columns."""
        return (self.width + self.gap) / len(self.columns)

    @property
    def height(self) -> float:
        """Return the height of all cells."""
        return self.cells * self.cell

    @property
    def bottom(self) -> float:
        """Return the y coordinate of the lower edge of cell 0."""
        return TOP + self.height

    def left(self, number: int) -> float:
        """Return a column's left edge."""
        return LEFT + number * self.pitch

    def right(self, number: int) -> float:
        """Return the right edge of a column."""
        return self.left(number) + self.pitch - self.gap

    def middle(self, number: int) -> float:
        """Return a column's middle."""
        return (self.left(number) + self.right(number)) / 2

    def y(self, cell: float) -> float:
        """Return the y coordinate of a cell's lower edge; cell 0 is at the bottom."""
        return self.bottom - cell * self.cell


def paint(timeline: Timeline, title: str = "") -> Drawing:
    """Return a timeline as a drawing. Raises UsageError when it has no cells."""
    if not timeline.cells:
        msg = "a timeline needs cells: record the run with `pyllamakv trace record SCRIPT -o FILE`"
        raise UsageError(msg)
    timeline = Timeline(timeline.title, timeline.operations() or timeline.frames)
    plot = lay_out(timeline)
    owners = sorted({owner for frame in timeline.frames for owner in frame.picture.owner})
    below = plot.bottom + 14
    named = len(timeline) <= _NAMED and len(plot.columns) == len(timeline)
    names = 11 * LETTER * max(len(frame.op) for frame in timeline.frames)
    turned = names > plot.pitch - 4
    axis = below + _STRIP + (14 + names if named and turned else 18 if named else 32)
    entries = _legend(plot, owners)
    legend, last = drawing.legend(entries, LEFT, LEFT + plot.width + RIGHT, axis + 26)
    notes = [Text(note, 16, last + 20 + 16 * line) for line, note in enumerate(_notes(plot))]
    bottom = last + 14 + 16 * len(notes)
    made = Drawing(LEFT + plot.width + RIGHT, bottom, title or timeline.title or "cells")
    made.add(
        Text(title or timeline.title or "The cells of a cache", 16, 27, "ink", 15, bold=True),
        Text(_subtitle(timeline, plot), 16, 45),
        *_grid(plot),
        *_cells(plot),
        *_counts(plot),
        *_bands(plot),
        *_streams(plot),
        *_marks(plot),
        *_strip(plot, below),
        *_axis(plot, below + _STRIP, named=named, turned=turned),
        *legend,
        *notes,
        *_tips(plot, below + _STRIP),
    )
    return made


def _subtitle(timeline: Timeline, plot: Plot) -> str:
    parts = [f"{timeline.cells} cells", f"{len(timeline)} operations"]
    if len(plot.columns) < len(timeline):
        parts.append(f"{len(plot.columns[0].frames)} of them to a column")
    failed = sum(bool(frame.failed) for frame in timeline.frames)
    moved = sum(frame.moved for frame in timeline.frames)
    if failed:
        parts.append(f"{failed} failed")
    if moved:
        parts.append(f"{moved} cells moved")
    return " · ".join(parts)


def _notes(plot: Plot) -> Iterator[str]:
    """Yield explanations of what is not one cell in one colour."""
    if plot.unknown:
        frames = sum(len(column.frames) for column in plot.columns)
        yield (
            f"{plot.unknown} of {frames} operations recorded no cells: the height shows how many "
            "are used, not which."
        )
    if plot.cells < plot.total:
        yield f"Cells {plot.cells} to {plot.total - 1} were never used and are not drawn."
    if plot.step > 1:
        yield f"A row shows {plot.step} cells in the colour of most of them."
    if any(len(each) > 1 for column in plot.columns for each, *_ in runs_of(column.picture, plot)):
        yield f"A bar shows {plot.bin} interleaved cells: each owner's share of them."


def _boxes(plot: Plot) -> Iterator[tuple[int, Box]]:
    """Yield owner and rectangle of each run of cells; equal ones side by side are one."""
    open_: dict[Run, int] = {}

    def close(run: Run, first: int, last: int) -> Iterator[tuple[int, Box]]:
        parts, start, length = run
        left, width = plot.left(first), plot.right(last) - plot.left(first)
        height = length * plot.cell
        bottom = plot.y(start)
        for owner, share in parts:
            bottom -= height * share
            yield owner, (left, bottom, width, height * share)

    for number, column in enumerate(plot.columns):
        unknown = column.counted is not None
        runs = {(((FREE, 1.0),), 0, plot.cells)} if unknown else set(runs_of(column.picture, plot))
        ended = [run for run in open_ if plot.gap or run not in runs]
        for run in ended:
            yield from close(run, open_.pop(run), number - 1)
        for run in sorted(runs - open_.keys()):
            open_[run] = number
    for run, first in open_.items():
        yield from close(run, first, len(plot.columns) - 1)


def _cells(plot: Plot) -> Iterator[Area]:
    boxes: dict[int, list[Box]] = {}
    for owner, box in _boxes(plot):
        boxes.setdefault(owner, []).append(box)
    # Free cells first, so that used cells cover them where pixels do not divide evenly.
    for owner in sorted(boxes, key=lambda each: (each != FREE, each)):
        yield Area(palette.role(owner), tuple(boxes[owner]))


def _counts(plot: Plot) -> Iterator[Area | Segment]:
    """Yield the number of used cells where it is all that is known."""
    boxes: list[Box] = []
    for number, column in enumerate(plot.columns):
        if column.counted is not None:
            left, y = plot.left(number), plot.y(min(column.counted, plot.cells))
            boxes.append((left, y, plot.right(number) - left, plot.bottom - y))
    if boxes:
        yield Area("counted", tuple(boxes))
        for x, y, width, _ in boxes:
            yield Segment("ink", ((x, y), (x + width, y)), 1.5)


def _bands(plot: Plot) -> Iterator[Band]:
    """Yield bands from the old to the new place of moved cells, if there is space."""
    if plot.gap < 6:
        return
    for number, column in enumerate(plot.columns[1:], start=1):
        edges: dict[int, list[tuple[float, float, float, float, float, float]]] = {}
        (frame,) = column.frames
        for source, target, length in frame.moves:
            if target >= len(frame.picture.owner) or max(source, target) + length > plot.cells:
                continue
            edges.setdefault(frame.picture.owner[target], []).append(
                (
                    plot.right(number - 1),
                    plot.y(source + length),
                    plot.y(source),
                    plot.left(number),
                    plot.y(target + length),
                    plot.y(target),
                )
            )
        for owner, each in edges.items():
            yield Band(palette.role(owner), tuple(each), 0.45)


def _streams(plot: Plot) -> Iterator[Segment]:
    for start in plot.columns[-1].picture.starts:
        y = plot.y(min(start, plot.cells))
        yield Segment("paper", ((LEFT, y), (LEFT + plot.width, y)), 2)


def _marks(plot: Plot) -> Iterator[Segment | Mark | Text]:
    y = TOP - 12
    free_from = 0.0
    for number, column in enumerate(plot.columns):
        x = plot.middle(number)
        both = column.failed and column.moved > 0
        if column.moved:
            at = x + 8 if both else x
            yield Mark("move", "diamond", at, y, 4.5 if plot.pitch >= 10 else 3)
        if column.failed:
            at = x - 8 if both else x
            yield Segment("bad", ((x, TOP - 4), (x, plot.bottom)), 1, dash=True)
            yield Mark("bad", "cross", at, y, 4 if plot.pitch >= 10 else 2.5)
            half = 11 * LETTER * len(column.failure) / 2
            label = min(max(x, LEFT + half), max(LEFT + plot.width - half, LEFT + half))
            if label - half >= free_from:  # otherwise it would cover the label before it
                yield Text(column.failure, label, y - 12, "bad", anchor="middle")
                free_from = label + half + 8


def _grid(plot: Plot) -> Iterator[Segment | Text]:
    for cell in ticks(plot.cells):
        y = plot.y(cell)
        yield Segment("line", ((LEFT - 5, y), (LEFT, y)))
        yield Text(str(cell), LEFT - 9, y + 4, anchor="end")
    yield Text("cells", 14, TOP + plot.height / 2, anchor="middle", turned=True)


def _strip(plot: Plot, top: float) -> Iterator[Area | Segment | Text]:
    """Yield the free cells and the largest hole of each column."""
    free, together = [], []
    bottom = top + _STRIP
    for number, column in enumerate(plot.columns):
        left, width = plot.left(number), plot.right(number) - plot.left(number)
        size = max(1, len(column.picture.owner))
        unused = (size - column.frames[-1].used) / size * _STRIP
        free.append((left, bottom - unused, width, unused))
        if column.counted is None:
            hole = column.picture.holes[1] / size * _STRIP
            together.append((left, bottom - hole, width, hole))
    yield Area("free", tuple(free))
    yield Area("hole", tuple(together))
    yield Segment("line", ((LEFT, bottom), (LEFT + plot.width, bottom)))
    yield Text("free", 14, top + _STRIP / 2, anchor="middle", turned=True)
    yield Text(str(plot.total), LEFT - 9, top + 8, anchor="end")
    yield Text("0", LEFT - 9, bottom + 4, anchor="end")


def _axis(plot: Plot, top: float, *, named: bool, turned: bool) -> Iterator[Text | Segment]:
    if named:
        for number, column in enumerate(plot.columns):
            op, x = column.frames[0].op, plot.middle(number)
            bad = column.failed
            role = "bad" if bad else "soft"
            if turned:
                yield Text(op, x + 4, top + 10, role, anchor="end", turned=True, bold=bad)
            else:
                yield Text(op, x, top + 18, role, anchor="middle", bold=bad)
        return
    lines = plot.columns[-1].frames[-1].number
    every = round_step(plot.width / lines)
    done = 0
    for number, column in enumerate(plot.columns):
        reached = column.frames[-1].number // every * every
        if reached > done:
            done = reached
            yield Segment("line", ((plot.middle(number), top), (plot.middle(number), top + 4)))
            yield Text(str(reached), plot.middle(number), top + 16, anchor="middle")
    yield Text("line of the trace", LEFT + plot.width, top + 30, anchor="end")


def _legend(plot: Plot, owners: Iterable[int]) -> list[tuple[str, str]]:
    """Return the entries of the legend."""
    entries = palette.legend({*owners, FREE})
    entries.append(("hole", "largest hole"))
    if plot.unknown:
        entries.append(("counted", "used, sequence not recorded"))
    if any(column.failed for column in plot.columns):
        entries.append(("cross", "failed"))
    if any(column.moved for column in plot.columns):
        entries.append(("diamond", "cells moved"))
    return entries


def _tips(plot: Plot, bottom: float) -> Iterator[Tooltip]:
    for number, column in enumerate(plot.columns):
        texts = [f"line {frame.number}: {frame.caption()}" for frame in column.frames[:5]]
        if len(column.frames) > 5:
            texts.append(f"and {len(column.frames) - 5} more")
        left = plot.left(number)
        box = (left, TOP, plot.pitch, bottom - TOP)
        yield Tooltip(box, "\n".join([*texts, column.frames[-1].numbers()]))


def lay_out(timeline: Timeline) -> Plot:
    """Return the layout of a timeline's columns and cells."""
    share = -(-len(timeline) // _COLUMNS)
    columns = tuple(
        Column(tuple(timeline.frames[at : at + share])) for at in range(0, len(timeline), share)
    )
    width = min(_WIDE, max(_NARROW, len(columns) * _COLUMN))
    cells = _drawn(timeline)
    step = max(1, -(-cells // _ROWS))
    rows = -(-cells // step)
    present = {owner for frame in timeline.frames for owner in frame.picture.owner}
    height = max(1, _HEIGHT // rows) / step
    return Plot(columns, cells, timeline.cells, len(present), width, step, height)


def _drawn(timeline: Timeline) -> int:
    """Return how many cells to draw: all up to the highest that was used, and some more.

    The number is a round one, as those of the axis are.
    """
    highest = 0
    for frame in timeline.frames:
        owner = frame.picture.owner
        used = next((at for at in range(len(owner), highest, -1) if owner[at - 1] != FREE), 0)
        highest = max(highest, used, frame.counted or 0)
    if not highest:
        return timeline.cells
    step = 1 << max(0, (highest - 1).bit_length() - 3)
    drawn = -(-(highest + 1) // step) * step
    return drawn if drawn <= 3 * timeline.cells // 4 else timeline.cells


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
    """Return a round number of lines, each ``width`` wide, between two labels."""
    steps: Iterator[int] = (times * 10**power for power in count() for times in (1, 2, 5))
    return next(step for step in steps if step * width >= 44)


#: (owner, share of the width) of each owner, first cell, number of cells.
Run = tuple[tuple[tuple[int, float], ...], int, int]


def runs_of(picture: Picture, plot: Plot) -> Iterator[Run]:
    """Yield each run of rows with one owner, and each bin in which owners interleave finely.

    A row of several cells has the colour of most of them.
    """
    owners = picture.owner[: plot.cells]
    at = 0
    for fine, bins in groupby(
        range(0, len(owners), plot.bin),
        key=lambda start: _interleaved(owners[start : start + plot.bin], plot.cell),
    ):
        starts = list(bins)
        end = min(starts[-1] + plot.bin, len(owners))
        if fine:
            for at in starts:
                part = owners[at : at + plot.bin]
                yield shares(part), at, len(part)
            at = end
            continue
        rows = [
            owners[start] if plot.step == 1 else most_frequent(owners[start : start + plot.step])
            for start in range(at, end, plot.step)
        ]
        for owner, run in groupby(rows):
            length = min(len(list(run)) * plot.step, end - at)
            yield ((owner, 1.0),), at, length
            at += length


def _interleaved(owners: Sequence[int], cell: float) -> bool:
    """Return whether the runs of some cells, each ``cell`` high, would blur into each other."""
    runs = sum(1 for _ in groupby(owners))
    return runs > 2 and len(owners) * cell <= _BLUR * runs
