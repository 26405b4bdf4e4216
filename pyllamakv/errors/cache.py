"""What the cache managers refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.errors.base import KvError, Unsupported, UsageError
from pyllamakv.errors.runtime import NoKVSlot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class KVCacheFull(NoKVSlot):
    """Report that a cache manager found no room: what it has, what was wanted, what was tried.

    ``cells`` the cache has, ``used`` hold tokens, ``largest_hole`` is the longest run of free ones
    (None where the build cannot tell), ``wanted`` more were asked for; ``defragged`` says whether
    a defragmentation was tried first.
    """

    def __init__(
        self,
        message: str,
        *,
        cells: int,
        used: int,
        largest_hole: int | None,
        wanted: int,
        defragged: bool = False,
        cause: str = "full",
        stats: Any = None,
    ) -> None:
        super().__init__(message, cause=cause, n_tokens=wanted, stats=stats)
        self.cells = cells
        self.used = used
        self.largest_hole = largest_hole
        self.wanted = wanted
        self.defragged = defragged


class NotSupported(Unsupported):
    """Say what a memory cannot do for a cache manager; ``reason`` says why, nothing was changed."""

    def __init__(self, message: str, reason: str = "", capability: str = "") -> None:
        super().__init__(message, capability)
        self.reason = reason


class NoSlotAvailable(KvError):
    """Report that every slot is in use; release one, or make the cache with more."""

    def __init__(self, message: str, *, slots: int = 0) -> None:
        super().__init__(message)
        self.slots = slots


class ReprocessNeeded(KvError):
    """Hand back the tokens that must be decoded again: the memory could not keep them."""

    def __init__(self, message: str, tokens: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tokens = tuple(tokens)


class BudgetTooSmall(UsageError):
    """Report a budget that not even one entry fits into."""

    def __init__(self, message: str, *, needed: int = 0, budget: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget


class PagingError(KvError):
    """Report a branch that could not be paged out or in; the cache is as it was before."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path
