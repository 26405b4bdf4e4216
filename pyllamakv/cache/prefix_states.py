"""Choose the prefixes whose states are saved, store the states, and evict the least valuable ones.

A recurrent or hybrid memory cannot return to an earlier position, and a sliding window only to
recent ones. A prompt then continues after the longest prefix whose state was saved.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.paging import MemoryPager
from pyllamakv.cache.radix_tree import TOKEN_BYTES, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime.context import Context

LOG = logging.getLogger("pyllamakv.cache")

#: Default of the cache managers. Branch points and ends of prompts have states as well, so the
#: interval only bounds what the first divergence from a long prompt evaluates again.
SCHEDULE = CheckpointSchedule(size=4096, interval=512, first=16, budget=1 << 30)


def saves(context: Context) -> bool:
    """Return whether the library can save the state of a sequence."""
    return Capability.STATES in context.native.about.capabilities


def checked_schedule(schedule: CheckpointSchedule | None) -> CheckpointSchedule:
    """Return a schedule, the default for None. Raises UsageError for something else."""
    if schedule is None:
        return SCHEDULE
    return arguments.instance("checkpoints", schedule, CheckpointSchedule, "a CheckpointSchedule")


def checked_positions(positions: Iterable[int], length: int) -> tuple[int, ...]:
    """Return positions of a prompt that a caller names. Raises UsageError for one outside of it."""
    found = arguments.items("checkpoints", positions, "positions of the prompt")
    return tuple(arguments.integer("a checkpoint", each, 0, length) for each in found)


class StatePoints:
    """The positions of one prompt and its continuation at which a state is due.

    These are multiples of the interval, the positions in ``branches``, where the prompt diverges
    from others, the last but one of the prompt, so that a repeated prompt evaluates one token, and
    the positions ``named`` by the caller. None is inside of a group.
    """

    __slots__ = ("_first", "_groups", "_interval", "_last", "_next", "_stops")

    def __init__(
        self,
        schedule: CheckpointSchedule,
        prompt: int,
        cached: int,
        *,
        branches: Iterable[int] = (),
        named: Iterable[int] = (),
        groups: Sequence[Group] = (),
    ) -> None:
        last, first = prompt - 1, max(schedule.first, 1)
        placed = {last, *branches, *range(schedule.interval, last, schedule.interval)}
        stops = {grouping.floor(groups, each) for each in placed if first <= each <= last}
        stops |= {grouping.floor(groups, each) for each in named if 0 < each <= last}
        #: Stops inside of the prompt, the next one at the end.
        self._stops = sorted((each for each in stops if each > cached), reverse=True)
        self._first, self._last, self._interval = first, last, schedule.interval
        self._groups = groups
        #: Position after the prompt from which the next state is due.
        self._next = prompt + schedule.interval

    def add(self, position: int, here: int) -> None:
        """Add a position at which another prompt diverges, if it is after ``here``."""
        position = grouping.floor(self._groups, position)
        ahead = max(here, self._first - 1) < position < self._last
        if ahead and position not in self._stops:
            self._stops.append(position)
            self._stops.sort(reverse=True)

    def limit(self, here: int, n: int) -> int:
        """Return how many of ``n`` tokens after ``here`` may be decoded before the next state."""
        for stop in reversed(self._stops):
            if stop > here:
                return min(n, stop - here)
        return n

    def due(self, here: int) -> bool:
        """Return whether a state is due after ``here`` tokens; once for each position."""
        found = False
        while self._stops and self._stops[-1] <= here:
            found = self._stops.pop() == here
        if here >= self._next:
            self._next, found = here + self._interval, True
        return found


def least_valuable(
    tree: RadixTree, wanted: Callable[[Node], bool], size: Callable[[Node], int]
) -> Node | None:
    """Return the node whose state saves the fewest tokens per byte and age, or None.

    A state saves the tokens after the next shorter state. Its age is the number of uses of the tree
    since its last use, as in GreedyDual-Size (Cao and Irani, 1997), which weighs cost per byte and
    recency.
    """

    def value(node: Node) -> tuple[float, int]:
        above = node.parent
        while above is not None and above.entry is None and above.page is None:
            above = above.parent
        saved = node.end - (above.end if above is not None else 0)
        age = tree.clock - node.last_used + 1
        return saved / (max(1, size(node)) * age), -node.end

    return min(filter(wanted, tree.walk()), key=value, default=None)


class StateStore:
    """States of prefixes in host memory, at most as many and as large as a schedule allows."""

    def __init__(self, schedule: CheckpointSchedule) -> None:
        self.schedule = schedule
        self.tree = RadixTree(whole_pages=True)
        self.pager = MemoryPager()
        #: Totals: states that were evicted, and the tokens of their prefixes.
        self.evictions = self.evicted_tokens = 0

    def best(self, key: bytes, groups: Sequence[Group] = ()) -> tuple[int, bytes]:
        """Return the length and the saved bytes of the longest prefix of a key; (0, b""): none."""
        node, length = self.tree.match(key)
        for each in reversed(node.path):
            if each.page is not None and each.end <= length:
                if grouping.floor(groups, each.end) != each.end:
                    continue
                self.tree.touch(each)
                return each.end, each.page.read()
        return 0, b""

    def put(self, key: bytes, saved: bytes) -> None:
        """Store the state after the tokens of a key, and evict others for it.

        A state that is larger than the whole budget is not stored.
        """
        if len(saved) > self.schedule.budget or not self.schedule.size:
            LOG.info("a state of %d bytes exceeds the budget of checkpoints", len(saved))
            return
        node = self.tree.insert(key)
        if node.page is None:
            self.tree.set_page(node, self.pager.write(saved, 0, len(key) // TOKEN_BYTES))
        self.tree.touch(node)
        while self.pager.count > self.schedule.size or self.pager.size > self.schedule.budget:
            least = least_valuable(
                self.tree, lambda each: each.page is not None, lambda each: each.page.size
            )
            assert least is not None
            self.evictions += 1
            self.evicted_tokens += least.end
            self._remove(least)

    def branches(self, key: bytes) -> set[int]:
        """Return the lengths at which a key diverges from the stored prefixes."""
        node, length = self.tree.match(key)
        return {length, *(each.end for each in node.path if len(each.children) > 1)}

    def __contains__(self, key: bytes) -> bool:
        node, length = self.tree.match(key)
        return length * TOKEN_BYTES == len(key) and node.end == length and node.page is not None

    def clear(self) -> None:
        """Remove all states."""
        for node in [each for each in self.tree.walk() if each.page is not None]:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        unused = self.tree.set_page(node, None)
        if unused is not None:
            unused.drop()
        self.tree.prune(node)
