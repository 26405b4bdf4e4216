"""Make a failing list of operations as short as it can be and still fail: delta debugging.

Nothing here knows what an operation is. The result is minimal in two ways: without any one of its
operations, or with any of them smaller by one, it does not fail any more (Zeller and Hildebrandt,
"Simplifying and Isolating Failure-Inducing Input", 2002, with joins and sizes added).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Sizes(Generic[T]):
    """Say how operations become smaller: ``size`` of one, ``cut`` to a smaller size of 1 or more.

    ``join`` makes one of two neighbours, or returns None where it cannot.
    """

    size: Callable[[T], int]
    cut: Callable[[T, int], T]
    join: Callable[[T, T], T | None]


class Shrinker(Generic[T]):
    """Shrink ``items``, which fail; ``best`` are the shortest so far that do.

    ``fails`` tells whether a list fails in the same way; no list is asked about twice. ``told``
    is called with ``best`` whenever it becomes smaller. ``runs`` counts the lists asked about.
    """

    def __init__(
        self,
        items: Sequence[T],
        fails: Callable[[tuple[T, ...]], bool],
        sizes: Sizes[T],
        told: Callable[[tuple[T, ...]], None] | None = None,
    ) -> None:
        self.best = tuple(items)
        self.runs = 0
        self._fails, self._sizes, self._told = fails, sizes, told
        self._asked: dict[tuple[T, ...], bool] = {self.best: True}

    def run(self) -> tuple[T, ...]:
        """Return a minimal list."""
        before: tuple[T, ...] = ()
        while before != self.best:
            before = self.best
            self._join()
            self._remove()
            self._cut()
        return self.best

    def offer(self, items: tuple[T, ...]) -> bool:
        """Take a list for the best one if it fails, and tell whether it does."""
        if items not in self._asked:
            self.runs += 1
            self._asked[items] = self._fails(items)
        if not self._asked[items]:
            return False
        self.best = items
        if self._told:
            self._told(items)
        return True

    def _remove(self) -> None:
        step = max(1, len(self.best) // 2)
        while True:
            before = len(self.best)
            # From the end: what comes after a failure goes first.
            start = len(self.best) - step
            while start > -step and self.best:
                low = max(0, start)
                self.offer(self.best[:low] + self.best[start + step :])
                start -= step
            if step > 1:
                step //= 2
            elif len(self.best) == before:
                return

    def _join(self) -> None:
        place = 0
        while place < len(self.best) - 1:
            end = place + 1
            while end < len(self.best) and self._joined(place, end + 1) is not None:
                end += 1
            self._join_all(place, end)
            place += 1

    def _join_all(self, start: int, end: int) -> None:
        """Make one of these neighbours, or one of each half of them, and so on."""
        if end - start < 2:
            return
        one = self._joined(start, end)
        if one is not None and self.offer((*self.best[:start], one, *self.best[end:])):
            return
        middle = (start + end) // 2
        # The second half first: then the places of the first stay what they are.
        self._join_all(middle, end)
        self._join_all(start, middle)

    def _joined(self, start: int, end: int) -> T | None:
        one: T | None = self.best[start]
        for other in self.best[start + 1 : end]:
            one = None if one is None else self._sizes.join(one, other)
        return one

    def _cut(self) -> None:
        for place in range(len(self.best)):
            step = self._sizes.size(self.best[place]) // 2
            while step:
                size = self._sizes.size(self.best[place]) - step
                if size < 1 or not self.offer(self._smaller(place, size)):
                    step //= 2

    def _smaller(self, place: int, size: int) -> tuple[T, ...]:
        one = self._sizes.cut(self.best[place], size)
        return (*self.best[:place], one, *self.best[place + 1 :])
