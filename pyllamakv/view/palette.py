"""The colours: distinguishable sequences on light and dark backgrounds.

Eight hues near those of Okabe and Ito, adjusted until every two of them, and free and shared cells,
differ for protan, deutan and tritan vision; a test measures that. Colour is never the only carrier
of information: terminal pictures have letters, marks have shapes, areas have tooltips.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pyllamakv.scenarios.cell_picture import FREE, SHARED

Scheme = Literal["light", "dark"]


@dataclass(frozen=True)
class Theme:
    """The colours of one scheme by role, as ``#rrggbb``."""

    paper: str
    ink: str
    soft: str
    line: str
    free: str
    counted: str
    hole: str
    shared: str
    bad: str
    move: str
    sequences: tuple[str, ...]

    @property
    def roles(self) -> dict[str, str]:
        """Return every colour by its role; sequences are ``s0`` to ``s7``."""
        named = {name: each for name, each in vars(self).items() if name != "sequences"}
        return named | {f"s{number}": each for number, each in enumerate(self.sequences)}


LIGHT = Theme(
    paper="#ffffff",
    ink="#1d232b",
    soft="#5b6672",
    line="#d8dee6",
    free="#e9edf1",
    counted="#cdd4db",
    hole="#a7b2bd",
    shared="#49545f",
    bad="#b3251d",
    move="#1d232b",
    sequences=(
        "#2b71ae", "#e8a020", "#0d9672", "#cc6d9f", "#7cc0ec", "#b8450c", "#4f4eb9", "#8f8a2a",
    ),
)  # fmt: skip
DARK = Theme(
    paper="#14181d",
    ink="#e4e9ef",
    soft="#9aa6b2",
    line="#313a44",
    free="#262d35",
    counted="#3c4650",
    hole="#626e7a",
    shared="#dfe5eb",
    bad="#ff8f85",
    move="#e4e9ef",
    sequences=(
        "#5fa9ec", "#efb542", "#3e9f7b", "#e085b5", "#93d0f7", "#cc5e23", "#8e76e8", "#ada141",
    ),
)  # fmt: skip
THEMES: dict[str, Theme] = {"light": LIGHT, "dark": DARK}


def role(owner: int) -> str:
    """Return the role of the colour for a cell's owner; after eight sequences they repeat."""
    if owner == FREE:
        return "free"
    return "shared" if owner == SHARED else f"s{owner % len(LIGHT.sequences)}"


def legend(owners: Iterable[int]) -> list[tuple[str, str]]:
    """Return role and name of each colour that these owners have."""
    kinds: dict[str, list[int]] = {}
    present = set(owners)
    for owner in sorted(present):
        if owner >= 0:
            kinds.setdefault(role(owner), []).append(owner)
    entries = [
        (kind, f"sequence {', '.join(map(str, mine))}") for kind, mine in sorted(kinds.items())
    ]
    return entries + [(role(each), name(each)) for each in (SHARED, FREE) if each in present]


def name(owner: int) -> str:
    """Return an owner in words."""
    if owner == FREE:
        return "free"
    return "shared" if owner == SHARED else f"sequence {owner}"
