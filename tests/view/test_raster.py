"""Test that a PNG equals its SVG; if it cannot be created, the error names the package."""

from __future__ import annotations

import builtins
import io

import pytest
from timeline_kit import timeline

from pyllamakv.errors import Unsupported
from pyllamakv.scenarios.cell_picture import FREE, SHARED, Picture
from pyllamakv.view import cell_drawing, palette, raster, timeline_drawing


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_their_colours(scheme) -> None:
    """The centre of each cell has the colour of its owner, in both schemes."""
    image_module = pytest.importorskip("PIL.Image")
    owners = (0, SHARED, FREE, 7)
    made = cell_drawing.paint(Picture("x", owners), columns=2, side=10, caption=False, legend=False)
    image = image_module.open(io.BytesIO(raster.png(made, scheme=scheme, scale=3)))
    assert image.format == "PNG"
    assert image.size == (57, 57)
    roles = palette.THEMES[scheme].roles
    for place, owner in enumerate(owners):
        x, y = 30 * (place % 2) + 13, 30 * (place // 2) + 13
        assert image.getpixel((x, y)) == rgb(roles[palette.role(owner)])


def test_png_contains_every_colour_of_a_timeline() -> None:
    """Bands, marks, rotated text and dashed lines are drawn."""
    image_module = pytest.importorskip("PIL.Image")
    made = timeline_drawing.paint(timeline())
    image = image_module.open(io.BytesIO(raster.png(made, scale=1)))
    assert image.size == (round(made.width), round(made.height))
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    wanted = palette.LIGHT.roles
    assert {rgb(wanted[role]) for role in ("paper", "s0", "s1", "s2", "free", "shared")} <= colours
    assert len(colours) > 50  # smooth edges and letters


def test_without_pillow_the_error_says_what_to_install(monkeypatch) -> None:
    """The error has the command, and names SVG, which needs no package."""
    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(Unsupported, match=r"pip install 'pyllamakv\[pictures\]'") as error:
        raster.png(timeline_drawing.paint(timeline()))
    assert error.value.capability == "pictures"
