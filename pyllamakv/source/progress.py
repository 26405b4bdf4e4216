"""Tell how far a long step is, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is being done, how much is done, and of how much (None when unknown). The unit
#: is bytes; a step without a measure is told once with 0 of None.
Progress = Callable[[str, int, int | None], None]


def no_progress(_what: str, _done: int, _total: int | None) -> None:
    """Take progress and show nothing."""
