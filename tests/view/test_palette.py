"""Test that colours are distinguishable by measurement, also with colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pyllamakv.view import palette

#: Linear light as seen with colour blindness (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "most": np.eye(3),
    "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0993], [-0.0039, -0.0481, 1.0520]],
    "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
#: Linear light to cone responses, and these to OKLab (Ottosson 2020).
CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def light(colour: str) -> np.ndarray:
    """Return a colour as linear light."""
    part = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def seen(colour: str, eyes: str) -> np.ndarray:
    """Return the perceived colour in OKLab coordinates, scaled to 0 to 100."""
    shown = np.clip(np.array(EYES[eyes]) @ light(colour), 0, 1)
    return 100 * (np.array(OKLAB) @ np.cbrt(np.array(CONES) @ shown))


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("scheme", palette.THEMES)
def test_colours_of_cell_kinds_are_distinguishable(scheme: str, eyes: str) -> None:
    """Sequences, free and shared cells differ by three times the visible minimum (about 2)."""
    theme = palette.THEMES[scheme]
    cells = (*theme.sequences, theme.free, theme.shared)
    worst = min(
        (float(np.linalg.norm(seen(one, eyes) - seen(other, eyes))), one, other)
        for one, other in combinations(cells, 2)
    )
    assert worst[0] > 6.5, worst


@pytest.mark.parametrize("scheme", palette.THEMES)
def test_text_colours_have_sufficient_contrast(scheme: str) -> None:
    """The contrast of text and warnings is at least that of WCAG for text: 4.5 to 1."""
    theme = palette.THEMES[scheme]
    weights = np.array([0.2126, 0.7152, 0.0722])
    paper = weights @ light(theme.paper)
    for ink in (theme.ink, theme.soft, theme.bad, theme.move):
        bright, dark = sorted((paper, weights @ light(ink)), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) > 4.5, ink


def test_light_and_dark_palettes_have_the_same_roles() -> None:
    """Each role has a colour in both schemes."""
    assert palette.LIGHT.roles.keys() == palette.DARK.roles.keys()
    assert {palette.role(owner) for owner in range(-2, 300)} <= palette.LIGHT.roles.keys()
