"""Lay a forward pass out: how many tokens each sequence gets, and the cheapest call for them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import UsageError
from pyllamakv.runtime.batch import Batch, as_int32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence as Lane


def lay_out(
    context: Context,
    lanes: tuple[Lane, ...],
    tokens: Sequence[int],
    positions: Sequence[int],
    sequences: Sequence[int],
    logits: Sequence[bool] | None,
) -> tuple[dict[int, int], Callable[[], None]]:
    """Return how many tokens each sequence gets, and what decodes them.

    Raises UsageError for a sequence that is not there, and for a single token in the wrong place;
    the rest is checked by the decode.
    """
    counts = lengths(sequences)
    for number in counts:
        if not 0 <= number < len(lanes):
            msg = f"sequence {number} is out of range: there are 0..{len(lanes) - 1}"
            raise UsageError(msg)
    n = len(tokens)
    if logits is None and 0 < n == len(counts) == len(positions) == len(sequences):
        # A token for each: what generation does, over and over.
        chosen = [lanes[number] for number in sequences]
        for lane, pos in zip(chosen, positions, strict=True):
            if pos != lane.ledger.next:
                msg = (
                    f"sequence {lane.id} goes on at position {lane.ledger.next}, not {pos}: "
                    "positions follow each other without a gap"
                )
                raise UsageError(msg)
        if n == 1:
            return counts, partial(context.step, chosen[0], tokens[0])
        return counts, partial(context.step_all, chosen, tokens)
    wanted = logits
    if wanted is None:
        last = {number: place for place, number in enumerate(sequences)}
        wanted = [last[number] == place for place, number in enumerate(sequences)]
    return counts, partial(context.decode, Batch.of(tokens, positions, sequences, wanted))


def checked(*lists: Any) -> tuple[list[int], ...]:
    """Return tokens, positions and sequences as lists of whole numbers of one length."""
    names = ("tokens", "positions", "sequences")
    found = tuple(as_int32(one, name).tolist() for one, name in zip(lists, names, strict=True))
    if len(set(map(len, found))) > 1:
        counted = ", ".join(f"{len(one)} {name}" for one, name in zip(found, names, strict=True))
        msg = f"a batch has as many tokens as positions and sequences, not {counted}"
        raise UsageError(msg)
    return found


def lengths(sequences: Sequence[int]) -> dict[int, int]:
    """Count the tokens of each sequence in a batch."""
    found: dict[int, int] = {}
    for each in sequences:
        found[each] = found.get(each, 0) + 1
    return found
