"""Report the progress of long steps, independently of how it is shown."""

from __future__ import annotations

from collections.abc import Callable

#: Called with a description, the progress, and the total (None if unknown), in bytes. A step
#: without a measure is reported once with 0 of None.
Progress = Callable[[str, int, int | None], None]


def no_progress(_what: str, _done: int, _total: int | None) -> None:
    """Ignore progress."""
