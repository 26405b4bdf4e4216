"""Keep a ring of checkpoints of a sequence whose memory cannot go back by itself.

Pure bookkeeping: what a checkpoint holds is bytes, whoever made them. A checkpoint at position p
holds everything up to and with p, so that who restores it goes on at p + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How many checkpoints a sequence has, how many positions lie between two, and the first of them.
SIZE, INTERVAL, FIRST = 24, 1664, 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Hold a sequence as it was after position ``pos``; without bytes it is incomplete."""

    pos: int
    saved: bytes

    @property
    def complete(self) -> bool:
        """Tell whether it can be restored."""
        return bool(self.saved)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Say how many checkpoints a sequence keeps, and when one is due.

    The oldest goes for a new one, and where all of them would hold more than ``budget`` bytes.
    """

    size: int = SIZE
    interval: int = INTERVAL
    first: int = FIRST
    budget: int = 1 << 30

    def __post_init__(self) -> None:
        for name, low in (("size", 0), ("interval", 1), ("first", 0), ("budget", 0)):
            object.__setattr__(self, name, arguments.whole(name, getattr(self, name), low))


class Ring:
    """Hold the checkpoints of one sequence, in the order of their positions."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self._kept: list[Checkpoint] = []
        self._bytes = 0
        #: The first position at which the next one is due.
        self.due = self.schedule.first

    @property
    def bytes(self) -> int:
        """Return how many bytes the checkpoints hold."""
        return self._bytes

    @property
    def positions(self) -> list[int]:
        """Return the positions of the checkpoints."""
        return [each.pos for each in self._kept]

    @property
    def newest(self) -> int:
        """Return the position of the last checkpoint, -1 where there is none."""
        return self._kept[-1].pos if self._kept else -1

    def put(self, checkpoint: Checkpoint) -> None:
        """Add the checkpoint of a position; what lies there or later is forgotten, as replaced."""
        self.prune(checkpoint.pos - 1)
        self._kept.append(checkpoint)
        self._bytes += len(checkpoint.saved)
        while self._kept and (
            len(self._kept) > self.schedule.size or self._bytes > self.schedule.budget
        ):
            self._bytes -= len(self._kept.pop(0).saved)
        # Also when it was too large to be kept: the next one will be no smaller.
        self.due = checkpoint.pos + self.schedule.interval

    def best(self, target: int) -> Checkpoint | None:
        """Return the last complete checkpoint before ``target``, or None."""
        fitting = (each for each in reversed(self._kept) if each.pos < target and each.complete)
        return next(fitting, None)

    def at(self, pos: int) -> Checkpoint | None:
        """Return the complete checkpoint of exactly this position, or None."""
        found = self.best(pos + 1)
        return found if found is not None and found.pos == pos else None

    def prune(self, last: int) -> None:
        """Forget every checkpoint behind position ``last``: its tokens are gone."""
        while self._kept and self._kept[-1].pos > last:
            self._bytes -= len(self._kept.pop().saved)
        newest = self._kept[-1].pos + self.schedule.interval if self._kept else 0
        self.due = max(self.schedule.first, newest)

    def copy_from(self, other: Ring, length: int) -> None:
        """Take over another sequence's checkpoints of its first ``length`` positions."""
        self.prune(-1)
        for each in other._kept:
            if each.pos < length:
                self.put(each)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._kept)
