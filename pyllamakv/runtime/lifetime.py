"""Define what loaded models share with all that ends with them, and how handles are freed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pyllamakv.errors import Closed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.binding.handle import Handle
    from pyllamakv.binding.protocol import Native

Raw = TypeVar("Raw", bound=int)


def free_quietly(free: Callable[[Raw], None], raw: Raw) -> None:
    """Free a handle; with its worker or library gone it is free already."""
    with suppress(WorkerDied, Closed):
        free(raw)


class LoadedModel:
    """Hold what contexts and samplers need of a model: the library, and the handle they end with.

    A base class of its own, so that the modules of contexts and samplers need not import `Model`,
    which imports them.
    """

    native: Native
    life: Handle[Any]
