"""Know who waits for a lease and who has one, and let them in in the order they came."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import Closed, KVCacheFull, KvError, NoSlotAvailable, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.cache.generation import Generation, Reason
    from pyllamakv.cache.lease import Manager


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """Count what a batcher did: batches and their tokens, generations by how they ended.

    ``slot_failures`` are decodes that found no cells; most of them are cured, and fail nobody.
    """

    waiting: int
    active: int
    decodes: int
    decoded_tokens: int
    chosen_tokens: int
    slot_failures: int
    finished: int
    cancelled: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class Roster:
    """Hold the generations of a batcher that have not ended, and count how the others did."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.waiting: deque[Generation] = deque()
        self.active: list[Generation] = []
        self.ended: dict[Reason, int] = dict.fromkeys(
            ("end", "stop", "length", "cancelled", "failed"), 0
        )
        #: Nobody gets in until fewer than so many are active.
        self._crowded: int | None = None

    def __bool__(self) -> bool:
        return bool(self.active or self.waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter((*self.active, *self.waiting))

    @property
    def full(self) -> bool:
        """Tell whether those who wait have to until somebody ends."""
        return bool(self.active and self._crowded is not None and len(self.active) >= self._crowded)

    def admit(self, steps: int) -> None:
        """Let in who waits, as far as the manager has leases; ``steps`` is when.

        Who is refused for good fails; so does who finds no room although nobody can make any.
        """
        while self.waiting and not self.full:
            self._crowded = None
            first = self.waiting[0]
            try:
                lease = self.manager.acquire(first.prompt, groups=first.groups)
            except (NoSlotAvailable, KVCacheFull) as error:
                if self.active:
                    self._crowded = len(self.active)
                else:
                    self.end(first, "failed", error)
            except (Closed, WorkerDied):
                raise
            except KvError as error:
                self.end(first, "failed", error)
            else:
                self.waiting.popleft()
                first.begin(lease, steps)
                self.active.append(first)

    def set_back(self, one: Generation) -> None:
        """Let one wait again, as the first, until another has ended."""
        self.active.remove(one)
        self.waiting.appendleft(one)
        self._crowded = len(self.active)
        one.give_back()

    def end(self, one: Generation, reason: Reason, error: Exception | None = None) -> None:
        """End one; raises what giving its lease back does, with it struck out."""
        try:
            one.end(reason, error)
        finally:
            self.left(one)

    def end_all(self, reason: Reason, error: Exception | None = None) -> None:
        """End all of them; what giving a lease back raises is raised when all have ended."""
        with ExitStack() as stack:
            # Last in, first out; a stack goes on where one of them raises.
            for each in reversed((*self.active, *self.waiting)):
                stack.callback(self.end, each, reason, error)

    def left(self, one: Generation) -> None:
        """Strike out one that has ended."""
        for those in (self.active, self.waiting):
            if one in those:
                those.remove(one)
        if one.reason is not None:
            self.ended[one.reason] += 1
