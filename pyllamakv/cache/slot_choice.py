"""Choose a slot for a prompt, and the slot whose prefix it shares. All functions are pure.

A slot is *reused* if its history and the prompt belong together; it keeps the common prefix.
Otherwise, the prompt gets an empty slot, or the least recently used one, and its prefix is copied
from the slot with the longest common prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from pyllamakv.binding import arguments

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

Policy = Literal["longest", "best"]


def checked(policy: str) -> Policy:
    """Return the name of a policy, or raise UsageError."""
    return cast("Policy", arguments.choice("policy", policy, get_args(Policy)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describe a slot: its tokens, how many the prompt begins with, and when it was used last."""

    length: int
    common: int
    in_use: bool
    last_used: int

    @property
    def discards(self) -> int:
        """Return the number of tokens that would be discarded."""
        return self.length - self.common


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """A choice: the slot, the length of its prefix, and the slot from which that is copied."""

    slot: int
    common: int
    source: int | None = None
    #: Whether cached tokens are discarded.
    evicts: bool = False


def count_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the length of the common prefix of two sequences of one type."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # Slices are compared in C. The first difference is within a[low:high].
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def choose(slots: Sequence[Candidate], policy: Policy) -> SlotChoice | None:
    """Choose a slot for a prompt; None if all slots are in use.

    "longest" reuses a slot if at least half of its history matches, drops the rest, and shares no
    cells with slots in use. "best" reuses a slot only if no history is lost, forks where histories
    diverge, and shares cells with any slot.
    """
    free = [n for n, each in enumerate(slots) if not each.in_use]
    if not free:
        return None
    target = _reusable_slot(slots, free, policy)
    if target is None:
        target = min(free, key=lambda n: (slots[n].length > 0, slots[n].last_used))
    sources = range(len(slots)) if policy == "best" else free
    source = max(sources, key=lambda n: (slots[n].common, n == target))
    evicts = slots[target].discards > 0
    if source == target:
        return SlotChoice(target, slots[target].common, None, evicts)
    return SlotChoice(target, slots[source].common, source, evicts)


def _reusable_slot(slots: Sequence[Candidate], free: list[int], policy: Policy) -> int | None:
    def belongs(each: Candidate) -> bool:
        if policy == "best":
            return each.discards == 0
        return 2 * each.common >= each.length

    fitting = [n for n in free if slots[n].common and belongs(slots[n])]
    # Among equals, the slot that discards the fewest tokens, then the least recently used one.
    order = [(-slots[n].common, slots[n].discards, slots[n].last_used, n) for n in fitting]
    return min(order)[3] if order else None
