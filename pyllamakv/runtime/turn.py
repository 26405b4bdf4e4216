"""Let one thread at a time work on a context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import Busy

if TYPE_CHECKING:
    import threading
    from types import TracebackType

    from pyllamakv.runtime.lifetime import Lifetime


class Turn:
    """Hold a context's lock for a `with` block; a second thread gets Busy, an ended one Closed."""

    __slots__ = ("_life", "_lock")

    def __init__(self, life: Lifetime) -> None:
        self._life = life
        self._lock: threading.Lock = life.lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise busy(self._life)
        if not self._life.open:
            self._lock.release()
            self._life.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._lock.release()


def busy(life: Lifetime) -> Busy:
    """Make the error for a second thread, or for a call from within another."""
    if not life.open:
        life.check()
    return Busy(
        f"this {life.what} is at work in another call; use one context per thread, or wait for it"
    )
