"""Draw the cells of a cache at one moment, in the terminal with rich, or as a drawing.

Each cell shows its first sequence as a letter and a colour, so that sequences are distinguishable
without colours. In a large cache, several cells share a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pyllamakv.scenarios.cell_picture import FREE, SHARED, Picture, shares
from pyllamakv.view import drawing, palette
from pyllamakv.view.drawing import Area, Drawing

if TYPE_CHECKING:
    from rich.text import Text


#: Characters of a free cell and of a cell of several sequences; the others are letters.
FREE_MARK, SHARED_MARK = "·", "#"
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letter(owner: int) -> str:
    """Return the character for an owner."""
    if owner == FREE:
        return FREE_MARK
    return SHARED_MARK if owner == SHARED else LETTERS[owner % len(LETTERS)]


def ink(owner: int) -> str:
    """Return how the terminal writes an owner's letter: dark on the owner's colour."""
    if owner == FREE:
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


def paint(
    picture: Picture,
    columns: int = 64,
    side: int = 10,
    *,
    heading: str = "",
    caption: bool = True,
    legend: bool = True,
) -> Drawing:
    """Return a picture as a drawing, ``columns`` places to a line, each ``side`` wide.

    A place of several cells is divided among their owners by the share of each. ``heading`` names
    the operation, above the caption; a legend of the colours is below the cells.
    """
    step, shown = picture.scaled(columns * columns)
    lines = -(-len(shown) // columns)
    top = (24 if caption else 0) + (18 if heading else 0)
    more = f", {step} cells to a place" if step > 1 else ""
    title = picture.caption() + more
    # Letters of size 12 are less than 7 wide on average.
    texts = [heading, title if caption else ""]
    width = max(columns * side - 1, 7 * max(map(len, texts)))
    bottom = top + lines * side - 1
    entries = palette.legend(picture.owner) if legend else []
    key, last = drawing.legend(entries, 0, width, bottom + 18)
    made = Drawing(width, last + 6 if key else bottom, title)
    if heading:
        made.add(drawing.Text(heading, 0, 14, role="ink", size=12, bold=True))
    if caption:
        made.add(drawing.Text(made.title, 0, top - 10, role="ink", size=12))
    boxes: dict[int, list[drawing.Box]] = {}
    for place in range(len(shown)):
        line, at = divmod(place, columns)
        left = float(at * side)
        for owner, share in shares(picture.owner[place * step : (place + 1) * step]):
            part = share * (side - 1)
            boxes.setdefault(owner, []).append((left, top + line * side, part, side - 1))
            left += part
    for owner in sorted(boxes):
        made.add(Area(palette.role(owner), tuple(boxes[owner]), palette.name(owner)))
    made.add(*key)
    return made
