"""Complete a change of the cache, or a close, before the exception of a signal handler is raised.

Python runs handlers between bytecodes, so also between a change of the cells and its record in a
ledger or a tree. If a handler raises there, as that of Ctrl-C does, both disagree. During a decode,
the library calls handlers (`pyllamakv.binding.signal_check`), and `Decoder` undoes the decode.
"""

from __future__ import annotations

# The functions in C: those of `signal` look for enum members, which takes 6 of 7 microseconds.
import _signal  # type: ignore[import-not-found]
import os
import threading
from contextlib import ContextDecorator
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from pyllamakv.binding.signal_check import CancelRequest, SignalAction

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

#: The numbers of all signals. A program may handle any of them.
_SIGNALS: Final = tuple(sorted(map(int, _signal.valid_signals())))


class Uninterrupted(ContextDecorator):
    """Raise what signal handlers raise at the end of a ``with`` block, or of a decorated function.

    Handlers run at once, also those that a handler sets in the block, and one that returns changes
    nothing. If one raises, a decode in the block ends as by a cancel. If several raise, the
    exception of the last is raised. The result of a decorated function may be lost: undo what it
    did. Blocks may be nested. In other threads than the main thread, where Python runs no handlers,
    this has no effect.
    """

    #: The outermost block of the main thread.
    _outer: ClassVar[Uninterrupted | None] = None

    def __init__(self) -> None:
        #: Handlers that are to be restored: the number of the signal, what replaces the handler
        #: and has it as its first argument, and the options of the signal.
        self._replaced: list[tuple[int, partial[None], SignalAction]] = []
        self._raised: BaseException | None = None
        self._thread = threading.get_ident()

    def _recreate_cm(self) -> Self:
        return type(self)()

    def __enter__(self) -> Self:
        if Uninterrupted._outer is None and threading.current_thread() is threading.main_thread():
            try:
                Uninterrupted._outer = self
                self._replace()
            except BaseException:  # of a handler that is not replaced yet
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if Uninterrupted._outer is self:
            self._end()

    def _replace(self) -> None:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            # Else it is ignored, ends the process, or was set in C.
            if callable(handler) and getattr(handler, "func", None) != self._run:
                held = partial(self._run, handler)
                self._replaced.append((number, held, SignalAction(number)))
                _signal.signal(number, held)

    def _run(self, handler: Callable[..., object], number: int, frame: FrameType | None) -> None:
        """Run a replaced handler."""
        try:
            try:
                handler(number, frame)
            finally:
                if Uninterrupted._outer is self:
                    self._replace()  # what the handler has set
        except BaseException as error:
            if Uninterrupted._outer is not self:  # the block ends
                raise
            self._raised = error
            CancelRequest.set(True)

    def _end(self) -> None:
        try:
            while Uninterrupted._outer is self or self._replaced:
                try:
                    self._restore()
                except BaseException as error:  # of a handler that was restored
                    self._raised = error
        finally:  # one may raise between the attempts, too
            self._restore()
            raised, self._raised = self._raised, None
            if raised is not None:
                try:
                    raise raised
                finally:
                    del raised  # which has this frame

    def _restore(self) -> None:
        Uninterrupted._outer = None
        CancelRequest.set(False)
        while self._replaced:
            number, held, action = self._replaced[-1]
            handler = held.args[0]
            present = _signal.getsignal(number)
            if present is held:  # else a handler has set another one
                _signal.signal(number, handler)
                present = handler
            if present is handler:
                action.restore()
            self._replaced.pop()

    @staticmethod
    def restore_in_child() -> None:
        """Restore the handlers in a process that another thread than that of the block forked."""
        outer = Uninterrupted._outer
        if outer is not None and outer._thread != threading.get_ident():
            outer._restore()


os.register_at_fork(after_in_child=Uninterrupted.restore_in_child)
