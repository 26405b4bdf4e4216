"""Count what a slot cache does, draw its slots, and check that slots and cells agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.cache.slot import Slot
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model

#: How much of a slot's beginning and end a line of `draw` shows.
SHOWN = 24


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Hold the numbers of a slot cache.

    Of ``prompts`` with ``prompt_tokens``, ``cached_tokens`` were there already; ``hits`` had any.
    ``forks`` copied a beginning, ``evictions`` threw a history away, ``refused`` found all slots in
    use. ``shifts`` were done in place, ``reprocessed`` tokens had to be decoded again.
    """

    slots: int
    in_use: int
    size: int
    tokens: int
    prompts: int
    hits: int
    misses: int
    prompt_tokens: int
    cached_tokens: int
    forks: int
    evictions: int
    shifts: int
    reprocessed: int
    refused: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class Counts:
    """Count what happens."""

    def __init__(self) -> None:
        self.prompts = self.hits = self.prompt_tokens = self.cached_tokens = 0
        self.forks = self.evictions = self.shifts = self.reprocessed = self.refused = 0

    def take(self, evicts: bool, cached: int, length: int) -> None:
        """Count a prompt that got a slot."""
        self.prompts += 1
        self.hits += cached > 0
        self.evictions += evicts
        self.cached_tokens += cached
        self.prompt_tokens += length

    def stats(self, slots: Sequence[Slot], size: int) -> SlotStats:
        """Return the numbers, with those of the slots."""
        return SlotStats(
            slots=len(slots),
            in_use=sum(each.lease is not None for each in slots),
            size=size,
            tokens=sum(len(each.tokens) for each in slots),
            misses=self.prompts - self.hits,
            **vars(self),
        )


def draw(slots: Sequence[Slot], size: int, model: Model) -> str:
    """Return a line per slot: its state, how full it is, and how it begins and ends."""
    order = {id(each): n for n, each in enumerate(sorted(slots, key=lambda one: one.last_used))}
    lines = []
    for number, each in enumerate(slots):
        state = "in use" if each.lease is not None else "free" if each.tokens else "empty"
        exact = each.sequence.ledger.exact
        shifted = "" if exact is None else f", shifted from {exact} on"
        lines.append(
            f"slot {number}: sequence {each.sequence.id}, {state}, {len(each.tokens)} of {size} "
            f"tokens{shifted}, age {len(slots) - order[id(each)]}: {_shown(each.tokens, model)}"
        )
    return "\n".join(lines)


def _shown(tokens: list[int], model: Model) -> str:
    if not model.info.has_vocab:
        head = " ".join(map(str, tokens[:8]))
        return head + (" ..." if len(tokens) > 8 else "")
    if len(tokens) <= 2 * SHOWN:
        return repr(model.detokenize(tokens))
    return f"{model.detokenize(tokens[:SHOWN])!r} ... {model.detokenize(tokens[-SHOWN:])!r}"


def examine(slots: Sequence[Slot], size: int, context: Context) -> None:
    """Raise AssertionError unless slots, ledgers and cells agree; the context's turn is held."""
    ids = [each.sequence.id for each in slots]
    _hold(len(set(ids)) == len(ids), f"two slots have one sequence: {ids}")
    for slot in slots:
        name, tokens = f"sequence {slot.sequence.id}", slot.tokens
        _hold(slot.sequence.open, f"{name} was closed")
        _hold(len(tokens) <= size, f"{name} has {len(tokens)} tokens in a slot of {size}")
        places = list(range(len(tokens)))
        _hold(slot.sequence.positions == places, f"{name} has gaps between its positions")
        last = slot.sequence.pos_max
        _hold(last == len(tokens) - 1, f"{name} ends at {last} and has {len(tokens)} tokens")
    ghosts = ghost_cells(context)
    _hold(not ghosts, f"cells that no ledger knows, or that are missing: {ghosts}")


def ghost_cells(context: Context) -> dict[int, int]:
    """Return by sequence how many positions its ledger and the cells do not have in common.

    The context's turn is held. What a sliding window has given away is no ghost. Empty where cells
    cannot be seen.
    """
    snapshot = context.kv.peek()
    if snapshot is None or not snapshot.streams:
        return {}
    found: dict[int, int] = {}
    main = [each for each in snapshot.streams if not each.swa]
    for number, ledger in enumerate(context.ledgers):
        there = np.concatenate([each.pos[each.has(number)] for each in main])
        known = np.asarray(ledger.positions, dtype=np.int32)
        wrong = len(np.setxor1d(there, known)) + len(there) - len(np.unique(there))
        if wrong:
            found[number] = wrong
    # Cells that belong to nobody.
    lost = sum(int(np.count_nonzero(each.used & (each.sharers == 0))) for each in main)
    return {**found, -1: lost} if lost else found


def _hold(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AssertionError(otherwise)
