"""Draw the cells of a cache: in the terminal with rich, or as SVG.

Each cell shows its first owner as a letter and a colour, so that a picture without colours still
tells the sequences apart. A large cache is drawn with several cells to a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.text import Text

    from pyllamakv.runtime.snapshot import Snapshot

#: What a free cell and a cell of many sequences look like; the others are letters.
FREE, SHARED = "·", "#"
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: Colours that terminals and SVG both know, well apart for most eyes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")

#: Owner of a free cell, and of one that several sequences share.
NOBODY, SEVERAL = -1, -2


@dataclass(frozen=True)
class Picture:
    """Hold the cells of a cache at one moment: per cell its owner, `NOBODY` or `SEVERAL`."""

    label: str
    owner: tuple[int, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, label: str = "") -> Picture:
        """Take a picture of a snapshot, its streams one after the other."""
        owners: list[int] = []
        for cells in snapshot.streams:
            lone = np.full(len(cells.pos), NOBODY, dtype=np.int64)
            for word in range(cells.seqs.shape[1]):
                for bit in range(64):
                    if cells.counts[64 * word + bit]:
                        lone[cells.has(64 * word + bit)] = 64 * word + bit
            lone[cells.sharers > 1] = SEVERAL
            lone[~cells.used] = NOBODY
            owners += lone.tolist()
        return cls(label, tuple(owners))

    @property
    def used(self) -> int:
        """Count the used cells."""
        return sum(owner != NOBODY for owner in self.owner)

    @property
    def holes(self) -> tuple[int, int]:
        """Return how many holes there are, and the largest."""
        free = [length for owner, length in self.runs() if owner == NOBODY]
        return len(free), max(free, default=0)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, length) of each run of cells with one owner."""
        start = 0
        for place in range(1, len(self.owner) + 1):
            if place == len(self.owner) or self.owner[place] != self.owner[start]:
                yield self.owner[start], place - start
                start = place

    def to_json(self) -> dict[str, Any]:
        """Return the picture as plain JSON values, run by run."""
        return {"label": self.label, "runs": [list(run) for run in self.runs()]}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Picture:
        """Return the picture that `to_json` described."""
        owners = [int(owner) for owner, length in raw["runs"] for _ in range(int(length))]
        return cls(str(raw["label"]), tuple(owners))

    def caption(self) -> str:
        """Return label and numbers in one line."""
        holes, largest = self.holes
        plural = "hole" if holes == 1 else "holes"
        numbers = (
            f"{self.used} of {len(self.owner)} cells used, {holes} {plural}, largest {largest}"
        )
        return f"{self.label}: {numbers}" if self.label else numbers

    def scaled(self, places: int) -> tuple[int, list[int]]:
        """Return how many cells share a place, and the owner of each of at most ``places``.

        A place shows its most frequent owner, and is free only when all of its cells are.
        """
        step = max(1, -(-len(self.owner) // places))
        if step == 1:
            return 1, list(self.owner)
        shown = []
        for start in range(0, len(self.owner), step):
            part = [owner for owner in self.owner[start : start + step] if owner != NOBODY]
            shown.append(max(sorted(set(part)), key=part.count) if part else NOBODY)
        return step, shown


def letter(owner: int) -> str:
    """Return the character for an owner."""
    if owner == NOBODY:
        return FREE
    return SHARED if owner == SEVERAL else LETTERS[owner % len(LETTERS)]


def colour(owner: int) -> str:
    """Return the colour for an owner."""
    if owner == NOBODY:
        return "#444444"
    return "#888888" if owner == SEVERAL else COLOURS[owner % len(COLOURS)]


def draw(picture: Picture, width: int = 64, rows: int = 16) -> Text:
    """Return a picture for the terminal, at most ``rows`` lines of ``width`` places."""
    from rich.text import Text

    step, shown = picture.scaled(width * rows)
    text = Text(picture.caption(), style="bold")
    if step > 1:
        text.append(f" ({step} cells to a place)", style="dim")
    for start in range(0, len(shown), width):
        text.append(f"\n{start * step:>6} ", style="dim")
        for owner in shown[start : start + width]:
            text.append(letter(owner), style=colour(owner))
    return text


def plain(picture: Picture, width: int = 64, rows: int = 16) -> str:
    """Return the same picture without colours."""
    return draw(picture, width, rows).plain


def svg(picture: Picture, columns: int = 64, side: int = 10) -> str:
    """Return a picture as one SVG element that needs nothing from outside."""
    step, shown = picture.scaled(columns * columns)
    lines = -(-len(shown) // columns)
    height = 20 + lines * side
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * side} {height}" '
        f'width="{columns * side}" height="{height}" role="img">',
        f"<title>{escape(picture.caption())}</title>",
        f'<text x="0" y="13" font-family="sans-serif" font-size="11">'
        f"{escape(picture.caption())}{f', {step} cells to a place' if step > 1 else ''}</text>",
    ]
    for line in range(lines):
        row = Picture("", tuple(shown[line * columns : (line + 1) * columns]))
        at = 0
        for owner, length in row.runs():
            fill = "#eeeeee" if owner == NOBODY else colour(owner)
            parts.append(
                f'<rect x="{at * side}" y="{20 + line * side}" width="{length * side - 1}" '
                f'height="{side - 1}" fill="{fill}"><title>{_name(owner)}</title></rect>'
            )
            at += length
    return "".join(parts) + "</svg>"


def _name(owner: int) -> str:
    if owner == NOBODY:
        return "free"
    return "shared" if owner == SEVERAL else f"sequence {owner}"
