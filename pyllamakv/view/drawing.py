"""Describe a picture by its items, and write it as a self-contained SVG.

A drawing uses roles instead of colours. The SVG follows the viewer's light or dark mode, and
`raster` paints the same drawing in one mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from pyllamakv.printable import printable
from pyllamakv.view import palette

#: A rectangle: left, top, width, height.
Box = tuple[float, float, float, float]
Anchor = Literal["start", "middle", "end"]

#: The class of every drawing, under which its rules stand.
CLASS = "plk"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


@dataclass(frozen=True)
class Area:
    """Fill rectangles in the colour of a role; ``tip`` is a tooltip."""

    role: str
    boxes: tuple[Box, ...]
    tip: str = ""


@dataclass(frozen=True)
class Band:
    """Fill four-cornered bands, each from a vertical edge (x, top, bottom) to another."""

    role: str
    edges: tuple[tuple[float, float, float, float, float, float], ...]
    opacity: float = 1.0


@dataclass(frozen=True)
class Segment:
    """Draw a line; ``dash`` makes it broken."""

    role: str
    points: tuple[tuple[float, float], ...]
    width: float = 1.0
    dash: bool = False


@dataclass(frozen=True)
class Mark:
    """Draw a sign around a point: a cross, or a diamond."""

    role: str
    kind: Literal["cross", "diamond"]
    x: float
    y: float
    size: float = 5.0


@dataclass(frozen=True)
class Text:
    """Write a line of text whose baseline begins, ends or is centred at a point."""

    text: str
    x: float
    y: float
    role: str = "soft"
    size: float = 11.0
    anchor: Anchor = "start"
    bold: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Tooltip:
    """A tooltip for a rectangle."""

    box: Box
    text: str


Item = Area | Band | Segment | Mark | Text | Tooltip


@dataclass
class Drawing:
    """Collect the items of a picture, ``width`` by ``height``, in the order of painting."""

    width: float
    height: float
    title: str
    items: list[Item] = field(default_factory=list)

    def add(self, *items: Item) -> None:
        """Add items on top of the others."""
        self.items += items


#: Approximate width of a letter, in font sizes.
LETTER = 0.55


def legend(
    entries: Iterable[tuple[str, str]], left: float, right: float, y: float
) -> tuple[list[Item], float]:
    """Return the items of a legend from a first baseline ``y`` downwards, and its last baseline.

    An entry is a role, "cross" or "diamond", and a text.
    """
    items: list[Item] = []
    x = left
    for role, text in entries:
        width = 18 + 11 * LETTER * len(text) + 14
        if x + width - 14 > right and x > left:
            x, y = left, y + 20
        if role == "cross":
            items.append(Mark("bad", "cross", x + 6, y - 4, 4))
        elif role == "diamond":
            items.append(Mark("move", "diamond", x + 6, y - 4, 4))
        else:
            items.append(Area(role, ((x, y - 10, 12, 12),)))
        if role == "counted":
            items.append(Segment("ink", ((x, y - 10), (x + 12, y - 10)), 1.5))
        items.append(Text(text, x + 18, y))
        x += width
    return items, y


def style() -> str:
    """Return the CSS rules under which drawings get their colours, for both schemes."""
    light, dark = palette.LIGHT.roles, palette.DARK.roles
    return (
        f".{CLASS} text{{font-family:{FONT}}}"
        f"{_rules(light)}@media (prefers-color-scheme:dark){{{_rules(dark)}}}"
    )


def svg(drawing: Drawing, *, inside: bool = False) -> str:
    """Return a drawing as one SVG element; ``inside`` a page that has `style` and a paper."""
    width, height = _short(drawing.width), _short(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{CLASS}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{_escaped(drawing.title)}</title>",
    ]
    if not inside:
        parts.append(f"<style>{style()}</style>")
        parts.append(f'<rect class="f-paper" width="{width}" height="{height}" rx="6"/>')
    parts += [_item(item) for item in drawing.items]
    return "".join(parts) + "</svg>"


def _escaped(text: str) -> str:
    return escape(printable(text, keep="\n\t"))


def _rules(roles: dict[str, str]) -> str:
    return "".join(
        f".{CLASS} .f-{role}{{fill:{colour}}}.{CLASS} .l-{role}{{stroke:{colour}}}"
        for role, colour in roles.items()
    )


def _item(item: Item) -> str:
    match item:
        case Area():
            steps = "".join(_box(box) for box in item.boxes)
            # Neighbouring cells of one colour must not show a seam where they meet.
            tip = f"><title>{_escaped(item.tip)}</title></path>" if item.tip else "/>"
            return f'<path class="f-{item.role}" shape-rendering="crispEdges" d="{steps}"{tip}'
        case Band():
            steps = "".join(_band(edge) for edge in item.edges)
            return f'<path class="f-{item.role}"{_opacity(item.opacity)} d="{steps}"/>'
        case Segment():
            steps = "L".join(f"{_short(x)} {_short(y)}" for x, y in item.points)
            dash = ' stroke-dasharray="2 3"' if item.dash else ""
            return (
                f'<path class="l-{item.role}" fill="none" stroke-width="{_short(item.width)}"'
                f'{dash} d="M{steps}"/>'
            )
        case Mark():
            return _mark(item)
        case Text():
            return _words(item)
        case Tooltip():
            x, y, width, height = map(_short, item.box)
            return (
                f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" '
                f'pointer-events="all"><title>{_escaped(item.text)}</title></rect>'
            )


def _mark(mark: Mark) -> str:
    x, y, r = _short(mark.x), _short(mark.y), _short(mark.size)
    if mark.kind == "diamond":
        return f'<path class="f-{mark.role}" d="M{x} {y}m0-{r}l{r} {r}l-{r} {r}l-{r}-{r}z"/>'
    left, top, side = _short(mark.x - mark.size), _short(mark.y - mark.size), _short(2 * mark.size)
    return (
        f'<path class="l-{mark.role}" fill="none" stroke-width="2" stroke-linecap="round" '
        f'd="M{left} {top}l{side} {side}m-{side} 0l{side}-{side}"/>'
    )


def _words(words: Text) -> str:
    x, y = _short(words.x), _short(words.y)
    turn = f' transform="rotate(-90 {x} {y})"' if words.turned else ""
    anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
    bold = ' font-weight="600"' if words.bold else ""
    return (
        f'<text class="f-{words.role}" x="{x}" y="{y}" font-size="{_short(words.size)}"'
        f"{anchor}{bold}{turn}>{_escaped(words.text)}</text>"
    )


def _box(box: Box) -> str:
    x, y, width, height = map(_short, box)
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _band(edge: Iterable[float]) -> str:
    x1, top1, bottom1, x2, top2, bottom2 = edge
    middle = _short((x1 + x2) / 2)
    a, b, c, d, e, f = map(_short, (x1, top1, bottom1, x2, top2, bottom2))
    return f"M{a} {b}C{middle} {b} {middle} {e} {d} {e}V{f}C{middle} {f} {middle} {c} {a} {c}z"


def _opacity(opacity: float) -> str:
    return "" if opacity >= 1 else f' opacity="{_short(opacity)}"'


def _short(number: float) -> str:
    """Return a number with as many digits as can be seen."""
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
