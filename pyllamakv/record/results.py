"""Check the recorded results of a row: what a replay compares, and what a picture is drawn from."""

from __future__ import annotations

import re
from typing import Any

from pyllamakv.record.batches import whole

#: A recorded picture of more cells is refused: the longest contexts have a tenth of them.
CELLS = 1 << 24
#: As many cells are drawn of a whole trace, its pictures together: they take 8 bytes each.
DRAWN = 1 << 28

#: A place of a batch as JSON names it.
_PLACE = re.compile(r"[0-9]{1,9}")


def check(result: dict[str, Any]) -> str:
    """Return what is wrong with a result; empty when nothing is."""
    for name in ("status", "polls", "used", "cells"):
        if not whole(result.get(name, 0)):
            return f"its {name} must be a number of 32 bits, found {result[name]!r}"
    best = result.get("best", {})
    if not isinstance(best, dict) or not all(map(_choice, best.values())):
        return f"its best must be [token, logit, margin] of places, found {best!r}"
    if not all(map(_PLACE.fullmatch, best)):
        return f"its best names places by numbers, found {best!r}"
    moved = result.get("moved", [])
    if not _rows(moved, 3) or not all(0 <= n <= CELLS for row in moved for n in row):
        return f"its moved must be a list of [from, to, cells], found {moved!r}"
    return _picture(result["picture"]) if "picture" in result else ""


def cells(result: dict[str, Any]) -> int:
    """Return how many cells the picture of a checked result has."""
    return sum(length for _, length in result["picture"]["runs"]) if "picture" in result else 0


def _choice(found: Any) -> bool:
    """Tell whether something is a token, its logit, and how far the next one is behind."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    token, *numbers = found
    return whole(token) and all(isinstance(n, float) or whole(n) for n in numbers)


def _picture(raw: Any) -> str:
    if not isinstance(raw, dict) or not isinstance(raw.get("label"), str):
        return f"its picture must have a label and runs, found {raw!r}"
    runs, streams = raw.get("runs"), raw.get("streams", [])
    known = runs and _rows(runs, 2) and all(owner >= -2 and length > 0 for owner, length in runs)
    if not known:
        return f"its picture must have runs of [owner, length], found {raw!r}"
    n = cells({"picture": raw})
    if n > CELLS:
        return f"its picture has {n} cells, more than any cache"
    parts = isinstance(streams, list) and all(type(n) is int and n > 0 for n in streams)
    if not parts or (streams and sum(streams) != n):
        return f"its picture's streams must be lengths that sum up to {n}, found {streams!r}"
    return ""


def _rows(found: Any, width: int) -> bool:
    """Tell whether something is a list of rows of whole numbers, each of a width."""
    return isinstance(found, list) and all(
        isinstance(row, list) and len(row) == width and all(map(whole, row)) for row in found
    )
