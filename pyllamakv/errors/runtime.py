"""What decodes and sequences refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.errors.base import KvError
from pyllamakv.errors.binding import NativeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DecodeError(NativeError):
    """Report a decode that failed for another reason than room; every sequence kept its tokens."""


class NoKVSlot(DecodeError):
    """Report that a batch found no cells.

    ``cause`` is ``"full"`` (too few free cells), ``"fragmented"`` (enough, but scattered) or
    ``"other"``; ``n_tokens`` is the size of the batch; ``stats`` are the cache's statistics then.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: str = "other",
        n_tokens: int = 0,
        stats: Any = None,
        log: Sequence[str] = (),
    ) -> None:
        super().__init__(message, code=1, log=log)
        self.cause = cause
        self.n_tokens = n_tokens
        self.stats = stats


class Cancelled(DecodeError):
    """Report a decode that was cancelled; every sequence kept its tokens."""


class PartialRemovalRefused(KvError):
    """Say that this memory cannot remove a part of a sequence."""


class SharedCells(KvError):
    """Refuse to move positions of cells that another sequence shares: it would change there too."""

    def __init__(self, message: str, sequences: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.sequences = tuple(sequences)


class StateError(NativeError):
    """Report a sequence state that cannot be saved or restored; nothing was changed.

    Where something was, ``saved`` holds the sequences that are gone, by id, for `Sequence.restore`.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        log: Sequence[str] = (),
        saved: Mapping[int, bytes] | None = None,
    ) -> None:
        super().__init__(message, code=code, log=log)
        self.saved = dict(saved or {})
