"""Own native objects: the order in which they are freed, and the thread that uses them.

Use a handle with ``with handle as raw: native.decode(raw, ...)``. An exclusive handle (a context)
serves one operation at a time: another thread gets `Busy`, and so does other code that the same
thread runs meanwhile, such as a signal handler. In ``with handle.reading()``, a thread waits until
the running call ends, and calls of other threads wait for it. A shared handle (a model) serves
several, and cannot be closed meanwhile. Closing closes the children first, or nothing if one of
them is in use. A finaliser frees an object that was dropped without `close`, in the same order.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from contextlib import contextmanager, suppress
from sys import _getframe
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyllamakv.closing import NotCopied
from pyllamakv.errors import Busy, Closed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

    from pyllamakv.binding.protocol import Native

Raw = TypeVar("Raw", bound=int)
R = TypeVar("R")

_CONTEXTLIB = vars(contextlib)
#: Packages whose frames belong to the operation that called them.
_OURS = frozenset({__name__.partition(".")[0], "contextlib", "functools"})


def _is_nested(frame: FrameType | None, holder: FrameType | None) -> bool | None:
    """Return whether a frame belongs to the operation of ``holder``, a frame below it.

    False if code of others was called between them, and None if ``holder`` has ended.
    """
    ours = True
    while frame is not None:
        if frame is holder:
            return ours
        ours = ours and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS
        frame = frame.f_back
    return None


def _holder(frame: FrameType) -> FrameType:
    """Return the frame that holds what ``frame`` enters: `ExitStack.enter_context` ends at once."""
    while frame.f_globals is _CONTEXTLIB and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _Node(Generic[Raw]):
    """The state that must outlive the handle, so that a finaliser can close it in order."""

    __slots__ = (
        "children",
        "closed",
        "free",
        "gate",
        "holder",
        "lock",
        "parent",
        "raw",
        "readers",
        "reading",
        "turn",
        "users",
        "what",
    )

    def __init__(
        self, raw: Raw, free: Callable[[Raw], None], what: str, parent: _Node[int] | None
    ) -> None:
        self.raw = raw
        self.free = free
        self.what = what
        self.parent = parent
        self.children: list[_Node[int]] = []
        self.users = 0
        self.closed = False
        # Reentrant, because operations on a context are nested.
        self.lock = threading.RLock()
        # The frame that entered first. Signal handlers and callbacks run in the same thread, so
        # only frames show whether a call is a part of the operation.
        self.holder: FrameType | None = None
        # Held while `raw` is used without the lock (cancel), and while it is freed. Reentrant,
        # because a signal handler may cancel.
        self.gate = threading.RLock()
        # Number of threads in `Handle.reading`; other threads wait for them.
        self.readers = 0
        # Whether the thread that holds the lock is one of them.
        self.reading = False
        self.turn = threading.Condition()

    def acquire(self) -> bool:
        """Lock the node; wait up to a second for reads of other threads, but not for their calls.

        Returns whether the node is locked.
        """
        for _ in range(100):
            if self.lock.acquire(blocking=False):
                return True
            if self.users and not self.reading:
                return False
            # A holder that is not counted has just begun, or is about to leave.
            if self.lock.acquire(timeout=0.01):
                return True
        return False

    def check_nested(self, frame: FrameType) -> None:
        """Raise Busy, with the node unlocked, for code that the operation in progress has called.

        ``frame`` is of the thread that has locked the node, and asks for it.
        """
        nested = _is_nested(frame, self.holder)
        if nested is None:
            # The exception of a signal handler struck when the last holder left.
            self.holder = frame
        elif not nested:
            self.lock.release()
            raise Busy(
                f"the {self.what} is in use by a call that this one interrupted or that called "
                "it: use it after that call"
            )

    def leave(self) -> None:
        """Count one use less, and unlock the node."""
        self.users -= 1
        if not self.users:
            self.holder = None
        self.lock.release()

    def wait_for_readers(self) -> None:
        """Wait up to a second until no thread is, or waits, in `Handle.reading`."""
        with self.turn:
            self.turn.wait_for(lambda: not self.readers, timeout=1.0)

    def take(self, taken: list[_Node[int]]) -> _Node[int] | None:
        """Lock this node and all below it; return the first one that is in use."""
        if not self.acquire():
            return self  # type: ignore[return-value]
        taken.append(self)  # type: ignore[arg-type]
        if self.users:
            return self  # type: ignore[return-value]
        # A copy: a finaliser in another thread may take a child out of the list meanwhile.
        for child in tuple(self.children):
            busy = child.take(taken)
            if busy is not None:
                return busy
        return None

    def close(self) -> _Node[int] | None:
        """Free everything below, then this; or nothing, and return the node that is in use."""
        taken: list[_Node[int]] = []
        try:
            busy = self.take(taken)
            if busy is None:
                # Children come after their parents in the list.
                for node in reversed(taken):
                    node.release()
            return busy
        finally:
            for node in taken:
                node.lock.release()

    def release(self) -> None:
        """Free this node once."""
        with self.gate:
            if self.closed:
                return
            self.closed = True
        try:
            self.free(self.raw)
        finally:
            # Only now: until then the parent must not be freed.
            if self.parent is not None and self in self.parent.children:
                self.parent.children.remove(self)  # type: ignore[arg-type]


class Handle(NotCopied, Generic[Raw]):
    """Own one native object: a library, a model, a context or a sampler."""

    _node: _Node[Raw]

    def __init__(
        self,
        raw: Raw,
        free: Callable[[Raw], None],
        what: str,
        parent: Handle[int] | None = None,
        *,
        exclusive: bool = False,
    ) -> None:
        """Own ``raw``; ``free`` frees it, and ``what`` names it in messages.

        A child references its parent, so that a parent is never collected before its children.
        """
        self._parent = parent
        self._exclusive = exclusive
        above = parent._node if parent is not None else None
        node = self._node = _Node(raw, free, what, above)
        if above is not None:
            with above.lock:
                if above.closed:
                    free(raw)
                    raise Closed(f"the {above.what} was closed; open it again")
                above.children.append(node)  # type: ignore[arg-type]
        self._finalizer = weakref.finalize(self, node.close)

    @property
    def closed(self) -> bool:
        """Return whether the object was freed."""
        return self._node.closed

    @property
    def raw(self) -> Raw:
        """Return the native handle; raises Closed. Only for handles of one thread."""
        node = self._node
        if node.closed:
            raise Closed(f"the {node.what} was closed; create a new one")
        return node.raw

    def __enter__(self) -> Raw:
        """Begin to use it; raises Busy when another operation does, Closed when it is gone."""
        node = self._node
        if self._exclusive:
            if node.readers and not node.users:
                # Without this, a loop of calls would take the lock again before a reader gets it.
                node.wait_for_readers()
            if not node.acquire():
                raise self._busy()
            if node.users:
                node.check_nested(_getframe(1))
            else:
                node.holder = _holder(_getframe(1))
            node.users += 1
        else:
            # A shared lock is held briefly: to count, and to close.
            with node.lock:
                node.users += 1
        if node.closed:
            self.__exit__(None, None, None)
            raise Closed(f"the {node.what} was closed; create a new one")
        return node.raw

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        node = self._node
        if self._exclusive:
            node.leave()
        else:
            with node.lock:
                node.users -= 1

    def _busy(self) -> Busy:
        what = self._node.what
        return Busy(
            f"the {what} is in use by another thread: use one {what} per thread, or wait for it"
        )

    def let_readers(self) -> None:
        """Let waiting `reading` of other threads in, between two calls of one operation."""
        node = self._node
        if not node.readers or node.users != 1:
            return
        holder = node.holder
        node.leave()
        node.wait_for_readers()
        node.lock.acquire()
        node.users, node.holder = 1, holder
        _ = self.raw

    @contextmanager
    def reading(self) -> Iterator[Raw]:
        """Wait until no other thread uses the object, then use it for a short read.

        Raises Closed. Meanwhile, calls of other threads wait instead of raising Busy. Raises Busy
        for code that an operation of this thread has called.
        """
        node, frame = self._node, _getframe(2)
        with node.turn:
            node.readers += 1
        try:
            node.lock.acquire()
            outermost = not node.users
            if outermost:
                node.holder = frame
            else:
                node.check_nested(frame)
            node.users += 1
            node.reading = node.reading or outermost
            try:
                yield self.raw
            finally:
                node.reading = node.reading and not outermost
                node.leave()
        finally:
            with node.turn:
                node.readers -= 1
                node.turn.notify_all()

    def interrupt(self, call: Callable[[Raw], R]) -> R:
        """Call with the raw handle while another thread may be using it: `Native.cancel`.

        It cannot be freed meanwhile. Raises Closed.
        """
        with self._node.gate:
            return call(self.raw)

    def close(self) -> None:
        """Free the object after its children. A second call does nothing.

        Raises Busy, with nothing closed, if one of them is in use.
        """
        busy = self._node.close()
        if busy is not None:
            raise Busy(
                f"cannot close the {self._node.what}: the {busy.what} is in use; cancel "
                "it or wait for it"
            )
        self._finalizer.detach()


class Results(Generic[Raw]):
    """Use an exclusive handle as `Handle` does, to read the results of the last call.

    A callback of an operation, such as a sampler, may do so during the operation.
    """

    def __init__(self, handle: Handle[Raw]) -> None:
        self._handle = handle

    def __enter__(self) -> Raw:
        node = self._handle._node
        if not node.acquire():
            raise self._handle._busy()
        if not node.users:
            node.holder = _holder(_getframe(1))
        node.users += 1
        if node.closed:
            node.leave()
        return self._handle.raw

    def __exit__(self, *_: object) -> None:
        self._handle._node.leave()


def free_quietly(free: Callable[[Raw], None], raw: Raw) -> None:
    """Free a handle, unless its worker or library is gone."""
    with suppress(WorkerDied, Closed):
        free(raw)


class LoadedModel:
    """The parts of a model that contexts and samplers need: the library and the handle.

    This is a separate base class, because the modules of contexts and samplers cannot import
    `Model`, which imports them.
    """

    native: Native
    life: Handle[Any]
