"""Let Python run its signal handlers during a decode in C.

Python runs handlers in its main thread, between two bytecodes. A decode in C may take seconds, so
the library calls a function of Python about every 20 ms: Python runs the handlers of pending
signals when that function begins. The exception of a handler ends the decode, and is raised when
the call of C returns. No handler and no other state of `signal` is changed.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyllamakv.errors import KvError
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The exception of a handler that ran during a decode of the main thread.
raised: list[BaseException] = []
#: An item for each check that began and did not complete, because a handler raised or still runs.
entered: list[None] = []


class CancelRequest:
    """Whether decodes of the main thread are to end: a handler raised in `Uninterrupted`."""

    made: ClassVar[bool] = False
    #: Cancels the decode of a worker that the main thread awaits.
    _cancel: ClassVar[Callable[[], None] | None] = None

    @classmethod
    def set(cls, made: bool) -> None:
        """Make or withdraw the request."""
        cls.made = made
        if made and cls._cancel is not None:
            with suppress(KvError):  # another thread may have closed the worker
                cls._cancel()

    @classmethod
    @contextmanager
    def ends(cls, cancel: Callable[[], None]) -> Iterator[None]:
        """Call ``cancel`` if a request is made in the block, which awaits a decode of a worker."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, cls._cancel = cls._cancel, cancel
        try:
            yield
        finally:
            cls._cancel = before


#: Read or set what the system does for a signal, with the GIL held.
_sigaction: Final = ctypes.PyDLL(None).sigaction
#: Bytes for a `struct sigaction`, which has at most 152 in 64-bit systems.
_ACTION_SIZE: Final = 256


class SignalAction:
    """What the system does for a signal, to be restored after `signal.signal` was called twice.

    `signal.signal` resets the effect of `signal.siginterrupt`, which asyncio uses.
    """

    __slots__ = ("_action", "_number")

    def __init__(self, number: int) -> None:
        """Read the present action."""
        self._number, self._action = number, ctypes.create_string_buffer(_ACTION_SIZE)
        _sigaction(number, None, self._action)

    def restore(self) -> None:
        """Set the action that was read."""
        _sigaction(self._number, self._action, None)


def _keep(_kind: object, error: BaseException, _trace: object) -> None:
    raised.append(error)


def _run_handlers(_: object) -> int:
    """Return whether the decode is to end. Handlers run when this begins."""
    entered.pop()
    return CancelRequest.made


#: Adds an item to `entered` in C, where no handler runs, and calls `_run_handlers`.
check: Final = map(_run_handlers, iter(partial(entered.append, None), 0)).__next__


def _callback() -> Any:
    try:
        # An exception, also one that a handler raises before the first line, calls `onerror`.
        return ffi.callback("int32_t(void)", check, error=1, onerror=_keep)
    except MemoryError:  # this system permits no code that is made at run time
        return ffi.NULL


_CALLBACK: Final = _callback()


def install(lib: Any) -> None:
    """Let a library run handlers in decodes of the main thread; in a forked child, of its own."""
    lib.plk_interrupts(_CALLBACK, threading.main_thread().ident or 0)


def raise_pending() -> None:
    """Raise the exception of a handler that ran during the last decode of this thread.

    If the handler of a second signal raised before the exception of the first was kept, cffi has
    printed both: then KeyboardInterrupt is raised.
    """
    if threading.current_thread() is threading.main_thread():
        lost = KeyboardInterrupt("the handlers of two signals raised at the same time")
        error = raised[0] if raised else lost
        raised.clear()
        raise error


def forget_pending() -> None:
    """Forget the exception of a handler, because the main thread raises another one."""
    if threading.current_thread() is threading.main_thread():
        raised.clear()


def keep_run(error: BaseException, code: int, rows: list[list[int]]) -> None:
    """Attach the status and the completed steps of an interrupted `Native.run` to its exception."""
    vars(error)["_completed_run"] = code, rows


def take_run(error: BaseException) -> tuple[int, list[list[int]]] | None:
    """Return and detach what `keep_run` attached, or None."""
    found: tuple[int, list[list[int]]] | None = vars(error).pop("_completed_run", None)
    return found
