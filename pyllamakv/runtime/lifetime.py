"""Close what belongs to a library in order: contexts before models, models before the library.

Each object that has a native handle holds a `Lifetime`; lifetimes know their children, children
their parent, and no lifetime knows its object, so that collecting an object ends its handle and
those below it, in the right order, whatever order the collector takes.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pyllamakv.errors import Busy, Closed

if TYPE_CHECKING:
    from collections.abc import Callable


class Lifetime:
    """Own one handle: ``free`` runs once, after the children's."""

    def __init__(self, what: str, free: Callable[[], None], parent: Lifetime | None = None) -> None:
        self.what = what
        self.open = True
        self.lock = threading.Lock()
        self._free = free
        self._parent = parent
        self._children: list[Lifetime] = []
        if parent is not None:
            parent.check()
            parent._children.append(self)

    def check(self) -> None:
        """Raise Closed when this has ended."""
        if not self.open:
            msg = f"the {self.what} was closed; open a new one"
            raise Closed(msg)

    def close(self) -> None:
        """End the children, then this; ended ones are passed over.

        Raises Busy, and ends nothing, while another thread is at work on any of them.
        """
        with ExitStack() as held:
            for each in (family := self._family()):
                if not each.lock.acquire(blocking=False):
                    msg = f"the {each.what} is at work in another thread; cancel or wait, then close"
                    raise Busy(msg)
                held.callback(each.lock.release)
            for each in family:
                each._end()
        if self._parent is not None and self in self._parent._children:
            self._parent._children.remove(self)

    def follow(self, owner: object) -> None:
        """Close when ``owner`` is collected, or at the interpreter's end."""
        weakref.finalize(owner, self.close)

    def _family(self) -> list[Lifetime]:
        below = [each for child in reversed(self._children) for each in child._family()]
        return [*below, self] if self.open else below

    def _end(self) -> None:
        if self.open:
            self.open = False
            self._free()
        self._children.clear()
