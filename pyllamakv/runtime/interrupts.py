"""Complete a change of the cache before Ctrl-C is raised.

Python raises KeyboardInterrupt as soon as a call of C returns, so also between a change of the
cells and its record in a ledger or a tree. Afterwards, both would disagree.
"""

from __future__ import annotations

# The functions in C: those of `signal` look for enum members, which takes 6 of 7 microseconds.
import _signal  # type: ignore[import-not-found]
import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType


class Uninterrupted(ContextDecorator):
    """Call the handler of SIGINT at the end of a ``with`` block, or of a decorated function.

    The result of such a function may be lost: undo what it did. Blocks may be nested, and several
    signals count as one. Other signals, such as SIGTERM, are not delayed. In other threads than the
    main thread, where Python runs no handlers, this has no effect.
    """

    #: The outermost block of the main thread.
    _outer: ClassVar[Uninterrupted | None] = None

    def __init__(self) -> None:
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def _recreate_cm(self) -> Self:
        return type(self)()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __enter__(self) -> Self:
        if Uninterrupted._outer is None and threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):  # else it is ignored, ends the process, or was set in C
                self._handler, Uninterrupted._outer = handler, self
                _signal.signal(_signal.SIGINT, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if Uninterrupted._outer is self:
            _signal.signal(_signal.SIGINT, self._handler)
            Uninterrupted._outer = None
            if self._received is not None:
                self._handler(*self._received)
