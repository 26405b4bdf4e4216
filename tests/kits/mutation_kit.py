"""Make mutants of a made-up patch."""

from __future__ import annotations

from qa.mutation.mutant import Mutant


def some(now: str = "y", **facts: object) -> Mutant:
    """Return a mutant of a made-up patch."""
    facts = {"patch": "p", "file": "f.h", "line": 3, "operator": "bound", "was": "x"} | facts
    return Mutant(**facts, now=now, files={"f.h": now.encode()})  # type: ignore[arg-type]
