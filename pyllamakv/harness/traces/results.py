"""Check the recorded results of a row: what a replay compares, and what a picture is drawn from."""

from __future__ import annotations

from typing import Any

#: A recorded picture of more cells is refused: no context can be made so large.
CELLS = 1 << 30


def check(result: dict[str, Any]) -> str:
    """Return what is wrong with a result; empty when nothing is."""
    for name in ("status", "polls", "used", "cells"):
        if not isinstance(result.get(name, 0), int):
            return f"its {name} must be a number, found {result[name]!r}"
    best = result.get("best", {})
    choices = best.values() if isinstance(best, dict) else [best]
    for choice in choices:
        numbers = isinstance(choice, list) and all(isinstance(n, (int, float)) for n in choice)
        if not numbers or len(choice) != 3:
            return f"its best must be [token, logit, margin] of places, found {best!r}"
    if not all(place.isdecimal() for place in best):
        return f"its best names places by numbers, found {best!r}"
    if not _rows(result.get("moved", []), 3):
        return f"its moved must be a list of [from, to, cells], found {result['moved']!r}"
    return _picture(result["picture"]) if "picture" in result else ""


def _picture(raw: Any) -> str:
    runs = raw.get("runs") if isinstance(raw, dict) else None
    streams = raw.get("streams", []) if isinstance(raw, dict) else []
    known = isinstance(runs, list) and runs and _rows(runs, 2)
    if not known or not all(owner >= -2 and length > 0 for owner, length in runs or ()):
        return f"its picture must have runs of [owner, length], found {raw!r}"
    cells = sum(length for _, length in runs or ())
    if cells > CELLS:
        return f"its picture has {cells} cells, more than any cache"
    parts = isinstance(streams, list) and all(type(n) is int and n > 0 for n in streams)
    if not parts or (streams and sum(streams) != cells):
        return f"its picture's streams must be lengths that sum up to {cells}, found {streams!r}"
    return ""


def _rows(found: Any, width: int) -> bool:
    """Tell whether something is a list of rows of whole numbers, each of a width."""
    return isinstance(found, list) and all(
        isinstance(row, list) and len(row) == width and all(type(n) is int for n in row)
        for row in found
    )
