"""Give native handles back where nothing can go wrong any more."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from pyllamakv.errors import Closed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable

Raw = TypeVar("Raw", bound=int)


def free_quietly(free: Callable[[Raw], None], raw: Raw) -> None:
    """Free a handle; with its worker or library gone it is free already."""
    with suppress(WorkerDied, Closed):
        free(raw)
