"""Bound the reuse of every policy, with knowledge of all future requests.

A cell can be reused if it stays in the cache between two uses. Of such intervals, as many as
possible are kept, with never more cells than the capacity: when there are too many, the interval
that ends last is given up, which is optimal (Belady: A Study of Replacement Algorithms for a
Virtual-Storage Computer, 1966). A leaf can only be evicted before its parent; that costs nothing
here, because every prompt that reuses a cell reuses the cells before it, so that the interval of a
parent never ends after that of its child. The bound ignores that a request needs all of its cells
at the same time, and that a manager evicts whole runs: no policy reuses more, and the best one may
reuse less.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from qa.replay.replayed_request import ReplayedRequest

_NEVER: Final = 1 << 62


def possible(requests: Iterable[ReplayedRequest]) -> int:
    """Return the cells of prompts that an unlimited cache reuses."""
    seen: set[int] = set()
    found = 0
    for cells, reusable in _accesses(requests):
        found += sum(cell in seen for cell in cells[:reusable])
        seen.update(cells)
    return found


def most_reused(requests: Iterable[ReplayedRequest], capacity: int) -> int:
    """Return the upper bound of the cells that a cache of ``capacity`` cells reuses."""
    steps = [(cell, at < n) for cells, n in _accesses(requests) for at, cell in enumerate(cells)]
    ends = _next_reuse(steps)
    kept: dict[int, int] = {}
    queue: list[tuple[int, int]] = []
    found = 0
    for number, (cell, _) in enumerate(steps):
        found += kept.pop(cell, -1) == number
        if ends[number] == _NEVER:
            continue
        kept[cell] = ends[number]
        heapq.heappush(queue, (-ends[number], cell))
        while len(kept) > capacity:
            end, last = heapq.heappop(queue)
            if kept.get(last) == -end:
                del kept[last]
    return found


def _next_reuse(steps: Sequence[tuple[int, bool]]) -> list[int]:
    """Return the number of the access that could reuse the cell of each access, or `_NEVER`."""
    ends = [_NEVER] * len(steps)
    later: dict[int, int] = {}
    for number in range(len(steps) - 1, -1, -1):
        cell, reuses = steps[number]
        ends[number] = later.get(cell, _NEVER)
        # A cell that is evaluated anyway need not stay until then.
        later[cell] = number if reuses else _NEVER
    return ends


def _accesses(requests: Iterable[ReplayedRequest]) -> Iterable[tuple[list[int], int]]:
    """Yield the cells of each request as nodes of a tree, and how many may be reused.

    The last cell of a prompt is always evaluated, and so is the text.
    """
    children: dict[tuple[int, int], int] = {}
    for each in requests:
        at, cells = 0, []
        for token in each.cells:
            at = children.setdefault((at, token), len(children) + 1)
            cells.append(at)
        yield cells, len(each.prompt) - 1
