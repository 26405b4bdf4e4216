"""Say how many tokens make way when a sequence is full: behind a head that stays, the oldest.

Half of what is not kept goes at once, so that it does not happen for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.cache import groups as grouping
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.cache.groups import Group


def shift_discard(
    size: int, keep: int, length: int, groups: Sequence[Group] = (), *, wanted: int = 0
) -> int:
    """Return how many tokens behind the first ``keep`` to discard of ``length`` in ``size`` places.

    Half of ``size - keep`` is free afterwards, and at least ``wanted``; a group at the end of what
    is discarded goes as a whole.
    """
    target = max((size - keep) // 2, 1, wanted)
    discard = min(max(target - (size - length), 0), max(length - keep, 0))
    return grouping.ceil(groups, keep + discard) - keep if discard else 0


def head(size: int, keep: int, groups: Sequence[Group] = ()) -> int:
    """Return how many tokens stay: ``keep``, fewer than ``size``, and no part of a group."""
    limited = min(max(keep, 0), size - 1)
    whole = grouping.ceil(groups, limited)
    return whole if whole < size else grouping.floor(groups, limited)


def truncate(
    tokens: Iterable[int], keep: int, size: int, groups: Iterable[tuple[int, int]] = ()
) -> tuple[list[int], tuple[Group, ...]]:
    """Return a prompt that fits into ``size``, and its groups: cut out behind its first ``keep``.

    Raises UsageError when what may not be split leaves nothing to cut.
    """
    given = list(tokens)
    whole = grouping.checked(groups, len(given), len(given))
    over = len(given) - size
    if over <= 0:
        return given, whole
    first = head(size, keep, whole)
    end = grouping.ceil(whole, first + over)
    if end >= len(given):
        msg = (
            f"a prompt of {len(given)} tokens cannot be cut to {size} with its first {first} kept: "
            "the group at its end would go; keep fewer, or make the group smaller"
        )
        raise UsageError(msg)
    return given[:first] + given[end:], grouping.without(whole, first, end)
