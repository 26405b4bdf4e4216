"""Choose the prefixes whose states are saved, and the least valuable state.

A recurrent or hybrid memory cannot return to an earlier position, and a sliding window only to
recent ones. A prompt then continues after the longest prefix whose state was saved.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.cache.radix_tree import TOKEN_BYTES, common, tokens_to_key
from pyllamakv.errors import NativeError, PagingError, Unsupported, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pyllamakv.cache.lease import SequenceLease
    from pyllamakv.cache.radix_tree import Node, RadixTree
    from pyllamakv.cache.residency import Residency
    from pyllamakv.cache.tier import PrefixTier
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
    if isinstance(positions, tuple) and not positions:  # the default, in the path of each prompt
        return ()
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


@dataclass(slots=True)
class SaveTime:
    """The seconds that the last save of a cache's backups took, successful or not."""

    seconds: float = 0.0


class PrefillBackup:
    """The state of an unfinished prompt after ``length`` tokens; empty: none.

    A cancelled decode of a memory with states loses all of them. The state is therefore saved after
    a micro-batch: after each one if ``always``, for a prompt that was cancelled before, else if all
    saves take no more than `SHARE` of the time. The first save of a cache is not limited, because
    its time is unknown; ``last`` is that of its last one.
    """

    #: Share of the time that saves may take.
    SHARE = 1 / 20

    def __init__(self, last: SaveTime, *, always: bool, cached: int = 0) -> None:
        self.always = always
        self._last = last
        #: How many tokens of the prompt the sequence had when it started, and at the last `due`.
        self.start = self.reached = cached
        self.length = 0
        self.saved = b""
        self._allowed, self._at = 0.0, monotonic()

    def due(self, length: int, leases: int) -> bool:
        """Return whether to save the state after ``length`` tokens; others also evaluate.

        A state of fewer tokens than the saved one is not worth its place.
        """
        self.reached, now = length, monotonic()
        self._allowed += (now - self._at) * self.SHARE / max(1, leases)
        self._at = now
        if length <= self.length:
            return False
        return self.always or self._allowed >= self._last.seconds

    def move(self) -> None:
        """Drop the state, because a page has it now."""
        self.saved = b""

    def restart(self, length: int) -> None:
        """Note that a page restored ``length`` tokens; a longer one that is lost is saved again."""
        if not self.saved:
            self.length = length

    def expect_cancel(self) -> None:
        """Save the state after each micro-batch from now on."""
        self.always = True

    def keep(self, length: int, saved: bytes) -> None:
        """Replace the state by one that was saved since `due`."""
        self._charge()
        self.length, self.saved = length, saved

    def record_failure(self) -> None:
        """Keep the former state; the time of the attempt delays the next one."""
        self._charge()
        self.always = False  # else each micro-batch of a prompt would repeat it

    def _charge(self) -> None:
        now = monotonic()
        self._last.seconds = now - self._at
        self._allowed -= self._last.seconds
        self._at = now


class PrefillBackups:
    """The backups of all prompts that a cache evaluates.

    ``branches`` get the states of cancelled prompts as pages; ``stored`` does without a tier for
    pages. ``leases`` returns the leases that are not released.
    """

    #: Maximum number of cancelled prompts that are known.
    MAX_CANCELLED = 64

    def __init__(
        self,
        branches: Residency,
        leases: Callable[[], Collection[SequenceLease]],
        stored: PrefixTier | None = None,
    ) -> None:
        self._branches, self._leases, self._stored = branches, leases, stored
        #: The last prompts whose states were lost because a decode was cancelled, and their salts.
        self._cancelled: deque[tuple[bytes, bytes]] = deque(maxlen=self.MAX_CANCELLED)
        self._save_time = SaveTime()
        #: Number of branches that were dropped for backups.
        self.evicted = 0
        branches.share_budget(lambda: self.size)

    @property
    def size(self) -> int:
        """Return the bytes of all backups, in host memory."""
        return sum(len(each.backup.saved) for each in self._leases() if each.backup is not None)

    def new(self, key: bytes, salt: bytes, cached: int) -> PrefillBackup | None:
        """Return the backup of a prompt with ``cached`` tokens; None if cancels lose no states."""
        if not self._branches.loses_all:
            return None
        cancelled = any(
            other == salt and 2 * common(key, had) * TOKEN_BYTES >= len(had)
            for had, other in self._cancelled
        )
        return PrefillBackup(self._save_time, always=cancelled, cached=cached)

    def update(self, lease: SequenceLease, backup: PrefillBackup) -> None:
        """Save the present state of a lease outside of the context, if that is due.

        Replaces the former one, which stays if that fails or exceeds the budget of states; neither
        is an error. Only the state of a prompt that was cancelled before takes the place of pages.
        A sequence with other tokens than those of the prompt is not saved.
        """
        branches, here = self._branches, len(lease.ledger)
        if not backup.due(here, len(self._leases())):
            return
        kept_later = branches.tier is not None or self._stored is not None
        tokens = tokens_to_key(lease.ledger.tokens)
        if not kept_later or tokens != lease.key[: here * TOKEN_BYTES]:
            return
        room = branches.schedule.budget - self.size + len(backup.saved)
        if branches.tier is not None and not backup.always:
            room -= branches.tier.size
        if branches.bytes_of(here) > room:
            return  # without the time of a save
        try:
            saved = lease.sequence.save(portable=False)
        except WorkerDied:
            raise
        except (NativeError, Unsupported, MemoryError) as error:
            LOG.warning("the state after %d tokens is not saved: %s", here, error)
            backup.record_failure()
            return
        if len(saved) > room:
            backup.record_failure()
            return
        backup.keep(here, saved)
        self.evicted += branches.drop_surplus()

    def longest(self, lease: SequenceLease, groups: Sequence[Group]) -> bytes:
        """Return the longest saved state of a prompt, its backup or a page; empty: there is none.

        It ends in no group, and before the last token.
        """
        length, saved, page = 0, b"", None
        if lease.backup is not None and lease.backup.saved:
            length, saved = lease.backup.length, lease.backup.saved
        node, known = self._branches.tree.match(lease.key[:-TOKEN_BYTES], lease.salt)
        for each in node.path:
            whole = each.end <= known and grouping.floor(groups, each.end) == each.end
            if each.page is not None and whole and each.end > length:
                length, page = each.end, each.page
        try:
            if page is not None:
                saved = page.read()
        except PagingError as error:
            LOG.warning("a prompt does not continue after %d tokens: %s", length, error)
            length = 0
        if lease.backup is not None:
            lease.backup.restart(length)
        return saved

    def complete(self, lease: SequenceLease) -> None:
        """Remove the stored state of a prompt that is complete."""
        if self._stored is not None:
            self._stored.replace_backup(lease.key, lease.salt, b"")

    def keep_emptied(self) -> None:
        """Make the saved states of leases that a cancel emptied pages, for the next prompts.

        Prompts that lost evaluated tokens save their states after each micro-batch from now on;
        one that has not started lost none.
        """
        for lease in self._leases():
            backup = lease.backup
            if backup is None or len(lease.ledger):
                continue
            if backup.reached > backup.start:
                lost = lease.key, lease.salt
                if lost in self._cancelled:  # a prompt counts once, as the last one
                    self._cancelled.remove(lost)
                self._cancelled.append(lost)
                backup.expect_cancel()
            backup.start = backup.reached = 0
            self._keep(lease, backup)
        self.evicted += self._branches.drop_surplus()

    def _keep(self, lease: SequenceLease, backup: PrefillBackup) -> None:
        """Make the saved state of a lease a page; without a tier for pages, the store gets it."""
        branches, tier = self._branches, self._branches.tier
        if not backup.saved:
            return
        if tier is None:
            if self._stored is not None:
                self._stored.replace_backup(lease.key, lease.salt, backup.saved)
            return
        node = branches.tree.insert(lease.key[: backup.length * TOKEN_BYTES], lease.salt)
        try:
            if node.page is None:
                page = branches.write_page(tier, backup.saved, 0, node.end)
                branches.tree.set_page(node, page)
            branches.tree.touch(node)
            backup.move()
        except PagingError as error:
            LOG.warning("the state after %d tokens is not kept: %s", node.end, error)
        finally:
            branches.tidy(node)


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
