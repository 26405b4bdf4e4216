"""Own native objects: the order in which they are freed, and the thread that uses them.

Use a handle with ``with handle as raw: native.decode(raw, ...)``. An exclusive handle (a context)
serves one thread at a time and refuses a second one with `Busy`. In ``with handle.reading()``, a
thread waits until the running call ends, and calls of other threads wait for it. A shared handle (a
model) serves several, and cannot be closed meanwhile. Closing closes the children first, or nothing
if one of them is in use. A finaliser frees an object that was dropped without `close`, in the same
order.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyllamakv.closing import NotCopied
from pyllamakv.errors import Busy, Closed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from pyllamakv.binding.protocol import Native

Raw = TypeVar("Raw", bound=int)
R = TypeVar("R")


class _Node(Generic[Raw]):
    """The state that must outlive the handle, so that a finaliser can close it in order."""

    __slots__ = (
        "children",
        "closed",
        "free",
        "gate",
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
        # Held while `raw` is used without the lock (cancel), and while it is freed.
        self.gate = threading.Lock()
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
        """Begin to use it; raises Busy when another thread does, Closed when it is gone."""
        node = self._node
        if self._exclusive:
            if node.readers and not node.users:
                # Without this, a loop of calls would take the lock again before a reader gets it.
                with node.turn:
                    node.turn.wait_for(lambda: not node.readers, timeout=1.0)
            if not node.acquire():
                raise Busy(
                    f"the {node.what} is in use by another thread: use one {node.what} per "
                    "thread, or wait for it"
                )
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
            node.users -= 1
            node.lock.release()
        else:
            with node.lock:
                node.users -= 1

    @contextmanager
    def reading(self) -> Iterator[Raw]:
        """Wait until no other thread uses the object, then use it for a short read.

        Raises Closed. Meanwhile, calls of other threads wait instead of raising Busy.
        """
        node = self._node
        with node.turn:
            node.readers += 1
        try:
            with node.lock:
                outermost = not node.users
                node.reading = node.reading or outermost
                node.users += 1
                try:
                    yield self.raw
                finally:
                    node.users -= 1
                    node.reading = node.reading and not outermost
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
