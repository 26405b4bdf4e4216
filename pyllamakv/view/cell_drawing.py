"""Draw the cells of a cache at one moment: in the terminal with rich, or as a drawing.

Each cell shows its first owner as a letter and a colour, so that a picture without colours still
tells the sequences apart. A large cache is drawn with several cells to a place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.printable import printable
from pyllamakv.view import drawing, palette
from pyllamakv.view.drawing import Area, Drawing, Words
from pyllamakv.view.palette import NOBODY, SEVERAL

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.text import Text

    from pyllamakv.runtime.snapshot import CellMap, Snapshot

__all__ = ["NOBODY", "SEVERAL", "Picture", "draw", "letter", "paint", "plain", "svg"]

#: What a free cell and a cell of many sequences look like; the others are letters.
FREE, SHARED = "·", "#"
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def owners(cells: CellMap) -> NDArray[np.int64]:
    """Return the owner of each cell: its sequence, `NOBODY` or `SEVERAL`."""
    lone = np.full(len(cells.pos), NOBODY, dtype=np.int64)
    for sequence in np.flatnonzero(cells.counts).tolist():
        lone[cells.has(sequence)] = sequence
    lone[cells.sharers > 1] = SEVERAL
    lone[~cells.used] = NOBODY
    return lone


@dataclass(frozen=True)
class Picture:
    """Hold the cells of a cache at one moment: per cell its owner, `NOBODY` or `SEVERAL`.

    ``streams`` are the lengths of the streams that lie one after the other, empty for one.
    """

    label: str
    owner: tuple[int, ...]
    streams: tuple[int, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, label: str = "") -> Picture:
        """Take a picture of a snapshot, its streams one after the other."""
        found = [owner for cells in snapshot.streams for owner in owners(cells).tolist()]
        streams = tuple(len(cells.pos) for cells in snapshot.streams)
        return cls(label, tuple(found), streams if len(streams) > 1 else ())

    @cached_property
    def used(self) -> int:
        """Count the used cells."""
        return sum(owner != NOBODY for owner in self.owner)

    @cached_property
    def holes(self) -> tuple[int, int]:
        """Return how many holes there are, and the largest."""
        free = [length for owner, length in self.runs() if owner == NOBODY]
        return len(free), max(free, default=0)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first cell of every stream but the first."""
        return tuple(np.cumsum(self.streams[:-1]).tolist()) if self.streams else ()

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, length) of each run of cells with one owner, inside one stream."""
        edges = [0, *self.starts, len(self.owner)]
        for start, end in pairwise(edges):
            for owner, run in groupby(self.owner[start:end]):
                yield owner, len(list(run))

    def to_json(self) -> dict[str, Any]:
        """Return the picture as plain JSON values, run by run."""
        streams = {"streams": list(self.streams)} if self.streams else {}
        return {"label": self.label, "runs": [list(run) for run in self.runs()], **streams}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Picture:
        """Return the picture that `to_json` described."""
        owners = [int(owner) for owner, length in raw["runs"] for _ in range(int(length))]
        streams = tuple(int(length) for length in raw.get("streams", ()))
        return cls(str(raw["label"]), tuple(owners), streams)

    def caption(self) -> str:
        """Return label and numbers in one line."""
        numbers = self.numbers()
        return f"{printable(self.label)}: {numbers}" if self.label else numbers

    def numbers(self) -> str:
        """Return what is counted of the cells in words."""
        holes, largest = self.holes
        plural = "hole" if holes == 1 else "holes"
        return f"{self.used} of {len(self.owner)} cells used, {holes} {plural}, largest {largest}"

    def scaled(self, places: int) -> tuple[int, list[int]]:
        """Return how many cells share a place, and the owner of each of at most ``places``.

        A place shows its most frequent owner, and is free only when all of its cells are.
        """
        step = max(1, -(-len(self.owner) // places))
        if step == 1:
            return 1, list(self.owner)
        return step, [
            most_frequent(self.owner[start : start + step])
            for start in range(0, len(self.owner), step)
        ]


def most_frequent(owners: Sequence[int]) -> int:
    """Return the owner that a place of several cells shows."""
    part = [owner for owner in owners if owner != NOBODY]
    return max(sorted(set(part)), key=part.count) if part else NOBODY


def letter(owner: int) -> str:
    """Return the character for an owner."""
    if owner == NOBODY:
        return FREE
    return SHARED if owner == SEVERAL else LETTERS[owner % len(LETTERS)]


def ink(owner: int) -> str:
    """Return how the terminal writes an owner's letter: dark on the owner's colour."""
    if owner == NOBODY:
        return "bright_black"
    theme = palette.DARK
    return f"{theme.paper} on {theme.roles[palette.role(owner)]}"


def draw(picture: Picture, width: int = 64, rows: int = 16) -> Text:
    """Return a picture with its caption for the terminal, ``rows`` lines of ``width`` at most."""
    from rich.text import Text

    step, shown = picture.scaled(width * rows)
    text = Text(picture.caption(), style="bold")
    if step > 1:
        text.append(f" ({step} cells to a place)", style="dim")
    text.append("\n")
    return text.append_text(cells(shown, width, step))


def cells(
    shown: Sequence[int], width: int, step: int = 1, styles: dict[int, str] | None = None
) -> Text:
    """Return places as lines of ``width``, numbered; ``styles`` are those of single places."""
    from rich.text import Text

    text = Text()
    for start in range(0, len(shown), width):
        text.append(f"{start * step:>6} ", style="dim")
        line = range(start, min(start + width, len(shown)))
        look = [(styles or {}).get(place) or ink(shown[place]) for place in line]
        for style, group in groupby(line, key=lambda place: look[place - start]):
            text.append("".join(letter(shown[place]) for place in group), style=style)
        text.append("\n")
    text.rstrip()
    return text


def plain(picture: Picture, width: int = 64, rows: int = 16) -> str:
    """Return the same picture without colours."""
    return draw(picture, width, rows).plain


def paint(picture: Picture, columns: int = 64, side: int = 10, *, caption: bool = True) -> Drawing:
    """Return a picture as a drawing, ``columns`` places to a line, each ``side`` wide."""
    step, shown = picture.scaled(columns * columns)
    lines = -(-len(shown) // columns)
    top = 24 if caption else 0
    more = f", {step} cells to a place" if step > 1 else ""
    made = Drawing(columns * side - 1, top + lines * side - 1, picture.caption() + more)
    if caption:
        made.add(Words(made.title, 0, 14, role="ink", size=12))
    boxes: dict[int, list[drawing.Box]] = {}
    for place, owner in enumerate(shown):
        line, at = divmod(place, columns)
        boxes.setdefault(owner, []).append((at * side, top + line * side, side - 1, side - 1))
    for owner in sorted(boxes):
        made.add(Area(palette.role(owner), tuple(boxes[owner]), palette.name(owner)))
    return made


def svg(picture: Picture, columns: int = 64, side: int = 10) -> str:
    """Return a picture as one SVG element that needs nothing from outside."""
    return drawing.svg(paint(picture, columns, side))
