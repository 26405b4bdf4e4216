"""Groups of tokens: ranges (first, end) of a prompt that must not be split.

A group (the tokens of one image, for example) must be decoded in one batch, reused completely, and
discarded completely. All functions are pure; groups are sorted and do not overlap.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Group = tuple[int, int]

_GROUPS = "ranges (first, end) of the prompt"


def checked(groups: Iterable[tuple[int, int]], length: int, largest: int) -> tuple[Group, ...]:
    """Return groups in order; UsageError for any that is empty, outside, too large or overlaps."""
    if isinstance(groups, tuple) and not groups:  # the default, in the path of each prompt
        return ()
    found = []
    for group in arguments.items("groups", groups, _GROUPS):
        ends = arguments.items("an item of groups", group, "a pair (first, end)")
        if len(ends) != 2:
            raise arguments.wrong_value("an item of groups", group, "a pair (first, end)")
        found.append((arguments.integer("first", ends[0]), arguments.integer("end", ends[1])))
    found.sort()
    for first, end in found:
        if not 0 <= first < end <= length:
            shown = arguments.shown((first, end))
            msg = f"group {shown} is not a range of a prompt of {length} tokens"
            raise UsageError(msg)
        if end - first > largest:
            msg = f"group ({first}, {end}) has {end - first} tokens; at most {largest} fit together"
            raise UsageError(msg)
    for (_, end), (first, _) in pairwise(found):
        if first < end:
            msg = f"groups overlap at token {first}: a token belongs to one group"
            raise UsageError(msg)
    return tuple(found)


def around(groups: Sequence[Group], at: int) -> Group | None:
    """Return the group that a cut before token ``at`` would split."""
    return next((group for group in groups if group[0] < at < group[1]), None)


def floor(groups: Sequence[Group], at: int) -> int:
    """Return the last index up to ``at`` where a cut splits no group."""
    group = around(groups, at)
    return at if group is None else group[0]


def ceil(groups: Sequence[Group], at: int) -> int:
    """Return the first index from ``at`` where a cut splits no group."""
    group = around(groups, at)
    return at if group is None else group[1]


def without(groups: Sequence[Group], first: int, end: int) -> tuple[Group, ...]:
    """Return the groups after removing tokens first..end; none of them may be split."""
    kept = [group for group in groups if group[1] <= first]
    moved = [(a - (end - first), b - (end - first)) for a, b in groups if a >= end]
    return (*kept, *moved)
