"""Own native objects: the order in which they are freed, and the thread that uses them.

A handle is the number of a native object. Get it with ``with owner as handle: native.decode(handle,
...)``. An `Owner` (of a library, model or adapter) serves several threads, and cannot be closed
meanwhile. A `Lock` (of a context or sampler) serves one operation at a time: another thread gets
`Busy`, and so does other code that the same thread runs meanwhile, such as a signal handler. In
``with lock.reading()``, a thread waits until the running call ends, and calls of other threads wait
for it. Closing closes the children first, or nothing if one of them is in use. A finaliser frees an
object that was dropped without `close`, in the same order.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from contextlib import contextmanager, suppress
from itertools import islice, repeat, starmap
from sys import _current_frames, _getframe
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.closing import NotCopied
from pyllamakv.errors import Busy, Closed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from pyllamakv.binding.protocol import Native

Raw = TypeVar("Raw", bound=int)
R = TypeVar("R")

_CONTEXTLIB = vars(contextlib)
#: Arguments of ways to acquire a lock, each in a list: within 10 ms, and ever.
_SOON, _EVER = ((True, 0.01),), ((True,),)
#: Flags of code whose frames may be suspended.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: Packages whose frames belong to the operation that called them.
_OURS = frozenset({__name__.partition(".")[0], "contextlib", "functools"})


#: What holds a lock: a frame, or a frame of one of some functions, whose codes these are.
_Holder = FrameType | frozenset[CodeType]


def _is_nested(frame: FrameType, holder: _Holder | None) -> bool | None:
    """Return whether a frame belongs to the operation of ``holder``, a frame below it.

    False if code of others was called between them, and None if ``holder`` has ended.
    """
    codes = holder if isinstance(holder, frozenset) else frozenset[CodeType]()
    ours = True
    below: FrameType | None = frame
    while below is not None:
        # The first frame asks for the lock, so it is not the holder if it runs the same function.
        if below is holder or (below.f_code in codes and below is not frame):
            return ours
        ours = ours and below.f_globals.get("__name__", "").partition(".")[0] in _OURS
        below = below.f_back
    return None


def _runs(frame: FrameType) -> bool:
    """Return whether any thread runs a frame, or may continue it."""
    suspends = frame.f_code.co_flags & _SUSPENDS
    tops = _current_frames().values()
    return bool(suspends) or any(_is_nested(top, frame) is not None for top in tops)


def _holder(frame: FrameType) -> FrameType:
    """Return the frame that holds what ``frame`` enters: `ExitStack.enter_context` ends at once."""
    while frame.f_globals is _CONTEXTLIB and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _Node(Generic[Raw]):
    """The state that must outlive the owner, so that a finaliser can close it in order."""

    __slots__ = (
        "attempts",
        "children",
        "closed",
        "frames",
        "free",
        "gate",
        "holder",
        "lock",
        "parent",
        "raw",
        "readers",
        "reading",
        "surplus",
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
        # Of an object of several threads, the frames that use it. One that does not run any more
        # is left over: a signal handler raised as `__exit__` began.
        self.frames: list[FrameType] = []
        # Of an object of one thread, how many uses are nested.
        self.users = 0
        self.closed = False
        # Reentrant, because operations on a context are nested.
        self.lock = threading.RLock()
        # Each item is the result of an attempt to acquire the lock at once. A `for` loop calls no
        # signal handler before it has stored an item, and a token takes two of them.
        self.attempts = map(self.lock.acquire, repeat(False))
        # What entered first. Signal handlers and callbacks run in the same thread, so only frames
        # show whether a call is a part of the operation.
        self.holder: _Holder | None = None
        # How often the lock is held for uses that a signal handler ended without `__exit__`.
        self.surplus = 0
        # Held while `raw` is used without the lock (cancel), and while it is freed. Reentrant,
        # because a signal handler may cancel.
        self.gate = threading.RLock()
        # Number of threads in `Lock.reading`; other threads wait for them.
        self.readers = 0
        # Whether the thread that holds the lock is one of them.
        self.reading = False
        self.turn = threading.Condition()

    def acquire(self, locked: list[bool]) -> bool:
        """Lock the node; wait up to a second for reads of other threads, but not for their calls.

        Returns whether the node is locked, and adds that to a list in the call of C that locks: a
        signal handler cannot raise between both.
        """
        for _ in range(100):
            locked.extend(islice(self.attempts, 1))
            if locked[-1]:
                return True
            if self.users and not self.reading:
                return False
            # A holder that is not counted has just begun, or is about to leave.
            locked.extend(starmap(self.lock.acquire, _SOON))
            if locked[-1]:
                return True
        return False

    def check_nested(self, frame: FrameType) -> _Holder | None:
        """Return the holder of a further use. Raise Busy for code that an operation has called.

        ``frame`` is of the thread that has locked the node, and asks for it.
        """
        holder = self.holder
        nested = _is_nested(frame, holder)
        if self._is_abandoned(frame):
            self.surplus += self.users
            self.users = 0
        if nested is False:
            raise Busy(
                f"the {self.what} is in use by a call that this one interrupted or that called "
                "it: use it after that call"
            )
        return holder if nested else frame

    def _is_abandoned(self, frame: FrameType) -> bool:
        """Return whether the exception of a signal handler struck as the last holder left.

        ``frame`` is of the thread that has locked the node.
        """
        holder = self.holder
        return (
            holder is not None
            and (isinstance(holder, frozenset) or not holder.f_code.co_flags & _SUSPENDS)
            and _is_nested(frame, holder) is None
        )

    def wait_for_readers(self) -> None:
        """Wait up to a second until no thread is, or waits, in `Lock.reading`."""
        with self.turn:
            self.turn.wait_for(lambda: not self.readers, timeout=1.0)

    def take(self, taken: list[_Node[int]]) -> _Node[int] | None:
        """Lock this node and all below it; return the first one that is in use."""
        if not self.acquire([]):
            return self  # type: ignore[return-value]
        taken.append(self)  # type: ignore[arg-type]
        if self.users and not self._is_abandoned(_getframe()):
            return self  # type: ignore[return-value]
        self.frames = [each for each in self.frames if _runs(each)]
        if self.frames:
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
        # The exception of a signal handler would leave an object that is closed and was not freed.
        with Uninterrupted():
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


class Owner(NotCopied, Generic[Raw]):
    """Own one native object, which several threads may use: a library, a model or an adapter."""

    _node: _Node[Raw]

    def __init__(
        self, raw: Raw, free: Callable[[Raw], None], what: str, parent: Owner[int] | None = None
    ) -> None:
        """Own ``raw``; ``free`` frees it, and ``what`` names it in messages.

        A child references its parent, so that a parent is never collected before its children.
        """
        self._parent = parent
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
        """Return the handle; raises Closed. Only for objects of one thread."""
        node = self._node
        if node.closed:
            raise Closed(f"the {node.what} was closed; create a new one")
        return node.raw

    def __enter__(self) -> Raw:
        """Begin to use the object; raises Closed if it was freed."""
        node, frame = self._node, _holder(_getframe(1))
        try:
            # The node's lock is held briefly: to add or remove a frame, and to close.
            with node.lock:
                node.frames.append(frame)
            return self.raw
        except BaseException:  # also of a signal handler
            self._leave(frame)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(_holder(_getframe(1)))

    def _leave(self, frame: FrameType) -> None:
        node = self._node
        with node.lock:
            if frame in node.frames:
                node.frames.remove(frame)

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


class _ReleasedOnExit(Generic[Raw]):
    """The end of a ``with`` block of `Lock` and of `ReadLock`."""

    _node: _Node[Raw]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Count one use less, and unlock the node."""
        node = self._node
        # Without a call before the last one: a signal handler cannot raise in the middle.
        node.users -= 1
        if not node.users:
            node.holder = None
            while node.surplus:
                node.surplus -= 1
                node.lock.release()
        node.lock.release()


class Lock(_ReleasedOnExit[Raw], Owner[Raw]):
    """Own one native object that serves one operation at a time: a context or a sampler."""

    def __enter__(self) -> Raw:
        """Begin to use it; raises Busy if another operation does, Closed if it was freed."""
        node, used, locked = self._node, False, False
        waited: list[bool] | None = None
        try:
            if node.readers and not node.users:
                # Without this, a loop of calls would take the lock again before a reader gets it.
                node.wait_for_readers()
            for locked in node.attempts:
                if not locked:
                    waited = []
                    if not node.acquire(waited):
                        raise self._busy()
                break
            frame = _getframe(1)
            if node.users:
                holder = node.check_nested(frame)
            else:
                holder = frame if frame.f_globals is not _CONTEXTLIB else _holder(frame)
            # In one line: a call of a handler before it would leave no holder of this use.
            node.users, node.holder, used = node.users + 1, holder, True
            if node.closed:
                raise Closed(f"the {node.what} was closed; create a new one")
            return node.raw
        except BaseException:  # also of a signal handler
            if used:
                self.__exit__(None, None, None)
            elif locked or (waited and waited[-1]):
                node.lock.release()
            raise

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
        locked: list[bool] = []
        try:
            self.__exit__(None, None, None)
            node.wait_for_readers()
        finally:  # also if a signal handler raises: the operation leaves it once more
            try:
                locked.extend(starmap(node.lock.acquire, _EVER))
            finally:
                if not locked:
                    node.lock.acquire()
                node.users, node.holder = 1, holder
        _ = self.raw

    @contextmanager
    def reading(self) -> Iterator[Raw]:
        """Wait until no other thread uses the object, then use it for a short read.

        Raises Closed. Meanwhile, calls of other threads wait instead of raising Busy. Raises Busy
        for code that an operation of this thread has called.
        """
        node, frame, used, outermost = self._node, _getframe(2), False, False
        locked: list[bool] = []
        waits = False
        try:
            with node.turn:
                node.readers, waits = node.readers + 1, True
            locked.extend(starmap(node.lock.acquire, _EVER))
            outermost = not node.users
            holder = frame if outermost else node.check_nested(frame)
            node.users, node.holder, used = node.users + 1, holder, True
            node.reading = node.reading or outermost
            yield self.raw
        finally:
            if used:
                node.reading = node.reading and not outermost
                self.__exit__(None, None, None)
            elif locked:
                node.lock.release()
            with node.turn:
                node.readers -= waits
                node.turn.notify_all()

    def interrupt(self, call: Callable[[Raw], R]) -> R:
        """Call with the handle while another thread may be using it: `Native.cancel`.

        It cannot be freed meanwhile. Raises Closed.
        """
        with self._node.gate:
            return call(self.raw)


class FunctionLock(_ReleasedOnExit[Raw]):
    """Use a context as its `Lock` does, in functions that are called for each token.

    Their codes identify the holder, because the creation of a frame object takes as long as the
    rest. They are no generators, and use no `ExitStack`.
    """

    __slots__ = ("_codes", "_lock", "_node")

    def __init__(self, lock: Lock[Raw], *functions: Any) -> None:
        """Use ``lock`` in some functions, which enter no other lock of the object themselves."""
        self._lock, self._node = lock, lock._node
        self._codes = frozenset(each.__code__ for each in functions)

    def _holder(self) -> _Holder | None:
        """Return the holder of a nested use. Raise Busy for code that an operation has called."""
        return self._node.check_nested(_getframe(2))

    def __enter__(self) -> Raw:
        node, used, locked = self._node, False, False
        waited: list[bool] | None = None
        try:
            if node.readers and not node.users:
                node.wait_for_readers()
            for locked in node.attempts:
                if not locked:
                    waited = []
                    if not node.acquire(waited):
                        raise self._lock._busy()
                break
            holder = self._holder() if node.users else self._codes
            node.users, node.holder, used = node.users + 1, holder, True
            return node.raw if not node.closed else self._lock.raw
        except BaseException:
            if used:
                self.__exit__(None, None, None)
            elif locked or (waited and waited[-1]):
                node.lock.release()
            raise


class ReadLock(FunctionLock[Raw]):
    """Use a context as its `Lock` does, to read the results of the last call.

    A callback of an operation, such as a sampler, may do so during the operation.
    """

    __slots__ = ()

    def _holder(self) -> _Holder | None:
        return self._node.holder


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
    owner: Owner[Any]
