"""Paint a drawing as PNG with Pillow, which is an extra: ``pip install 'pyllamakv[pictures]'``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import Unsupported
from pyllamakv.view.drawing import Area, Band, Drawing, Item, Mark, Segment, Text, Tooltip
from pyllamakv.view.palette import THEMES

if TYPE_CHECKING:
    from pyllamakv.view.palette import Scheme

#: Painted so many times larger than shown and then averaged, for smooth edges.
_FINER = 2
#: How finely a curved edge is cut into straight ones.
_CUTS = 16
#: Pillow's letter that each anchor of a `Text` is, with the baseline.
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def png(drawing: Drawing, *, scheme: Scheme = "light", scale: int = 2) -> bytes:
    """Return a drawing as a PNG file, ``scale`` pixels to a unit.

    Raises Unsupported where Pillow is not installed, with the command that installs it.
    """
    image_module, draw_module = _pillow()
    factor = scale * _FINER
    size = (round(drawing.width * factor), round(drawing.height * factor))
    painter = _Painter(image_module, draw_module, THEMES[scheme].roles, factor, size)
    for item in drawing.items:
        painter.paint(item)
    file = io.BytesIO()
    painter.image.reduce(_FINER).convert("RGB").save(file, "PNG", optimize=True)
    return file.getvalue()


def check() -> None:
    """Raise Unsupported if Pillow is not installed, before a long run."""
    _pillow()


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        msg = "PNG pictures need Pillow: pip install 'pyllamakv[pictures]'; SVG needs nothing"
        raise Unsupported(msg, "pictures") from error
    return Image, ImageDraw


class _Painter:
    def __init__(
        self, image: Any, draw: Any, roles: dict[str, str], factor: int, size: tuple[int, int]
    ) -> None:
        self._new, self._draw, self._roles, self._factor = image, draw, roles, factor
        self.image = image.new("RGBA", size, roles["paper"])
        self._brush = draw.Draw(self.image)

    def paint(self, item: Item) -> None:
        """Paint one item over the others; tooltips are not painted."""
        colour = "" if isinstance(item, Tooltip) else self._roles[item.role]
        match item:
            case Area(boxes=boxes):
                self._fill([self._corners(*box) for box in boxes], colour, 1)
            case Band(edges=edges, opacity=opacity):
                self._fill([self._curve(*edge) for edge in edges], colour, opacity)
            case Segment(points=points, width=width, dash=dash):
                self._line(points, colour, width, dash)
            case Mark():
                self._mark(item, colour)
            case Text():
                self._words(item, colour)

    def _at(self, *numbers: float) -> list[int]:
        return [round(number * self._factor) for number in numbers]

    def _corners(self, x: float, y: float, width: float, height: float) -> list[tuple[int, int]]:
        left, top, right, bottom = self._at(x, y, x + width, y + height)
        # Pillow's shapes have their last row and column inside.
        right, bottom = max(left, right - 1), max(top, bottom - 1)
        return [(left, top), (right, top), (right, bottom), (left, bottom)]

    def _curve(
        self, x1: float, top1: float, bottom1: float, x2: float, top2: float, bottom2: float
    ) -> list[tuple[int, int]]:
        upper, lower = [], []
        for number in range(_CUTS + 1):
            part = number / _CUTS
            eased = part * part * (3 - 2 * part)
            x = x1 + (x2 - x1) * part
            upper.append((x, top1 + (top2 - top1) * eased))
            lower.append((x, bottom1 + (bottom2 - bottom1) * eased))
        points = [*upper, *reversed(lower)]
        return [(round(x * self._factor), round(y * self._factor)) for x, y in points]

    def _fill(self, shapes: list[list[tuple[int, int]]], colour: str, opacity: float) -> None:
        if opacity >= 1:
            for shape in shapes:
                self._brush.polygon(shape, fill=colour)
            return
        layer = self._new.new("RGBA", self.image.size, f"{colour}00")
        brush = self._draw.Draw(layer)
        for shape in shapes:
            brush.polygon(shape, fill=f"{colour}{round(255 * opacity):02x}")
        self.image.alpha_composite(layer)

    def _line(
        self, points: tuple[tuple[float, float], ...], colour: str, width: float, dash: bool
    ) -> None:
        thick = max(1, *self._at(width))
        pieces = _dashes(points) if dash else [points]
        for piece in pieces:
            self._brush.line([tuple(self._at(*point)) for point in piece], colour, thick)

    def _mark(self, mark: Mark, colour: str) -> None:
        x, y, r = mark.x, mark.y, mark.size
        if mark.kind == "diamond":
            corners = ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
            self._brush.polygon([tuple(self._at(*corner)) for corner in corners], fill=colour)
            return
        for first, last in (((x - r, y - r), (x + r, y + r)), ((x - r, y + r), (x + r, y - r))):
            self._brush.line([tuple(self._at(*first)), tuple(self._at(*last))], colour,
                             2 * self._factor)  # fmt: skip

    def _words(self, words: Text, colour: str) -> None:
        from PIL import ImageFont

        font = ImageFont.load_default(words.size * self._factor)
        thick = self._factor // 4 if words.bold else 0
        anchor = _ANCHORS[words.anchor]
        if not words.turned:
            self._brush.text(self._at(words.x, words.y), words.text, colour, font, anchor,
                             stroke_width=thick)  # fmt: skip
            return
        left, top, right, bottom = font.getbbox(words.text, anchor=anchor)
        layer = self._new.new("RGBA", (int(right - left) + 2, int(bottom - top) + 2), f"{colour}00")
        self._draw.Draw(layer).text((1 - left, 1 - top), words.text, colour, font, anchor,
                                    stroke_width=thick)  # fmt: skip
        turned = layer.rotate(90, expand=True)
        x, y = self._at(words.x, words.y)
        # The baseline's start is at (1 - left, 1 - top) of the layer; a quarter turn to the left
        # puts it at (1 - top, width - (1 - left)).
        place = (x - int(1 - top), y - int(layer.width - (1 - left)))
        self.image.alpha_composite(turned, (max(0, place[0]), max(0, place[1])))


def _dashes(points: tuple[tuple[float, float], ...]) -> list[tuple[tuple[float, float], ...]]:
    """Cut a straight line into strokes of 2 with gaps of 3."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    length = max(abs(x2 - x1), abs(y2 - y1), 1.0)
    found: list[tuple[tuple[float, float], ...]] = []
    at = 0.0
    while at < length:
        first, last = at / length, min(at + 2, length) / length
        found.append(
            (
                (x1 + (x2 - x1) * first, y1 + (y2 - y1) * first),
                (x1 + (x2 - x1) * last, y1 + (y2 - y1) * last),
            )
        )
        at += 5
    return found
