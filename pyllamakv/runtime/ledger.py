"""Record the tokens, positions and shared cells of each sequence.

A token gets a mark when it is decoded. A fork copies the marks, because it shares the cells. Two
sequences share a cell if and only if their ledgers have a common mark. A ledger changes only after
the library has succeeded.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from pyllamakv.errors import UsageError
from pyllamakv.runtime.batch import positions_and_sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyllamakv.runtime.batch import BatchArrays

#: Limit of positions, as in plk.h: llama.cpp cannot remove the largest positions of an int32.
POSITION_LIMIT: Final = 1 << 30


class Ledger:
    """Record one sequence: parallel lists in the order of positions, and the ``next`` position."""

    __slots__ = ("first_moved", "logits_at", "logits_epoch", "marks", "next", "positions", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.marks: list[int] = []
        self.next = 0
        #: Index of the first entry whose position was shifted: a fresh decode of these tokens would
        #: give other rows. None: no entry was shifted.
        self.first_moved: int | None = None
        #: Decode and index in its batch of the logits of the last token.
        self.logits_at = -1
        self.logits_epoch = -1

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def moved(self) -> bool:
        """Return whether the positions of any entries were changed."""
        return self.first_moved is not None

    def clear(self) -> None:
        """Forget everything."""
        del self.tokens[:], self.positions[:], self.marks[:]
        self._settle()

    def append(self, token: int, pos: int, mark: int) -> None:
        """Add one decoded token."""
        if pos < self.next:
            self.extend((token,), (pos,), (mark,))
            return
        self.tokens.append(token)
        self.positions.append(pos)
        self.marks.append(mark)
        self.next = pos + 1

    def append_next(self, token: int, mark: int, place: int, epoch: int) -> None:
        """Add a decoded token that follows; its logits are at a place of the batch of an epoch."""
        pos = self.next
        self.tokens.append(token)
        self.positions.append(pos)
        self.marks.append(mark)
        self.next = pos + 1
        self.logits_at, self.logits_epoch = place, epoch

    def extend(self, tokens: Iterable[int], positions: Iterable[int], marks: Iterable[int]) -> None:
        """Add decoded tokens; positions may be in any order."""
        first = len(self.positions)
        self.tokens.extend(tokens)
        self.positions.extend(positions)
        self.marks.extend(marks)
        added = self.positions[max(first - 1, 0) :]
        if added != sorted(added):
            self._sort()
            if self.first_moved is not None:
                self.first_moved = 0  # some were decoded earlier; their number is unknown
        self._settle()

    def replace(
        self,
        tokens: Iterable[int],
        positions: Iterable[int],
        marks: Iterable[int],
        exact: int | None,
    ) -> None:
        """Record other tokens, in the order of their positions; ``exact`` as of the ledger."""
        self.clear()
        self.extend(tokens, positions, marks)
        self.first_moved = exact

    def renew_marks(self, first: int) -> None:
        """Give every entry a new mark, starting at ``first``: its cells are not shared."""
        self.marks = list(range(first, first + len(self.marks)))

    def span(self, p0: int | None, p1: int | None) -> tuple[int, int]:
        """Return the entries at positions p0 <= p < p1, as a slice."""
        start = 0 if p0 is None else bisect_left(self.positions, p0)
        end = len(self.positions) if p1 is None else bisect_left(self.positions, p1)
        return start, max(start, end)

    def without(self, p0: int | None, p1: int | None) -> list[int]:
        """Return the positions that are not at p0 <= p < p1."""
        start, end = self.span(p0, p1)
        return self.positions[:start] + self.positions[end:]

    def remove(self, p0: int | None, p1: int | None) -> int:
        """Drop the entries at p0 <= p < p1 and return how many they were."""
        start, end = self.span(p0, p1)
        self._delete(start, end)
        self._settle()
        return end - start

    def forget_since(self, mark: int) -> None:
        """Drop the last entries with this mark or later ones, also an incomplete entry."""
        end = min(len(self.tokens), len(self.positions), len(self.marks))
        while end and self.marks[end - 1] >= mark:
            end -= 1
        if end < max(len(self.tokens), len(self.positions), len(self.marks)):
            del self.tokens[end:], self.positions[end:], self.marks[end:]
            self._settle()

    def copy_from(self, other: Ledger, p0: int | None, p1: int | None, *, share: bool) -> None:
        """Copy entries of another sequence; with ``share`` False, into new cells."""
        start, end = other.span(p0, p1)
        marks = other.marks[start:end] if share else [-1] * (end - start)
        if other.first_moved is not None and other.first_moved < end:
            # Entries may be inserted between existing ones; then all count as shifted.
            self._touched(max(other.first_moved - start, 0) if not self.positions else 0)
        self.extend(other.tokens[start:end], other.positions[start:end], marks)

    def take_logits(self, other: Ledger) -> None:
        """Have the logits of another sequence that ends with the same token."""
        self.logits_at, self.logits_epoch = other.logits_at, other.logits_epoch

    def marks_in(self, p0: int | None, p1: int | None) -> set[int]:
        """Return the marks of the entries at p0 <= p < p1."""
        start, end = self.span(p0, p1)
        return {mark for mark in self.marks[start:end] if mark >= 0}

    def move(self, p0: int | None, p1: int | None, change: Callable[[int], int]) -> None:
        """Change the positions p0 <= p < p1, and remove entries that become negative."""
        start, end = self.span(p0, p1)
        if start == end:
            return
        self.positions[start:end] = [change(p) for p in self.positions[start:end]]
        self._moved(start)

    def follow(self, marks: set[int], change: Callable[[int], int]) -> None:
        """Change the positions of the entries with these marks: another sequence moved them."""
        first = next((i for i, mark in enumerate(self.marks) if mark in marks), len(self.marks))
        pairs = zip(self.positions, self.marks, strict=True)
        self.positions = [change(p) if mark in marks else p for p, mark in pairs]
        self._moved(first)

    def check_move(self, p0: int | None, p1: int | None, delta: int) -> None:
        """Refuse a shift to positions that are negative, too large, or already in use."""
        start, end = self.span(p0, p1)
        if start == end:
            return
        low, high = self.positions[start] + delta, self.positions[end - 1] + delta
        if low < 0:
            msg = (
                f"shifting by {delta} would put position {self.positions[start]} at {low}; "
                "remove those tokens first"
            )
            raise UsageError(msg)
        if high >= POSITION_LIMIT:
            msg = f"shifting by {delta} would put a token at {high}; positions end at 2^30 - 1"
            raise UsageError(msg)
        before = self.positions[start - 1] if start else -1
        after = self.positions[end] if end < len(self.positions) else high + 1
        if low <= before or high >= after:
            met = before if low <= before else after
            msg = (
                f"shifting by {delta} would put positions {low}..{high} onto position {met}, "
                f"which is "
                "in use; remove those tokens first"
            )
            raise UsageError(msg)

    def shared_with(
        self, others: Iterable[tuple[int, Ledger]], p0: int | None, p1: int | None
    ) -> tuple[int, ...]:
        """Return the ids of the other ledgers that share a cell at positions p0 <= p < p1."""
        mine = self.marks_in(p0, p1)
        return tuple(i for i, o in others if o is not self and not mine.isdisjoint(o.marks))

    def _moved(self, first: int) -> None:
        before = self.positions
        self._sort()
        self._touched(first if self.positions is before else 0)
        self._delete(0, bisect_left(self.positions, 0))
        self._settle()

    def _touched(self, first: int) -> None:
        self.first_moved = first if self.first_moved is None else min(self.first_moved, first)

    def _delete(self, start: int, end: int) -> None:
        del self.tokens[start:end], self.positions[start:end], self.marks[start:end]
        if self.first_moved is not None and start < self.first_moved:
            self.first_moved -= min(end, self.first_moved) - start

    def _sort(self) -> None:
        order = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        if order != list(range(len(order))):
            # All at once, because a signal handler may raise between statements.
            self.tokens, self.marks, self.positions = (
                [values[i] for i in order] for values in (self.tokens, self.marks, self.positions)
            )

    def _settle(self) -> None:
        self.next = self.positions[-1] + 1 if self.positions else 0
        if self.first_moved is not None and self.first_moved >= len(self.positions):
            self.first_moved = None
        self.logits_epoch = -1


def record_batch(ledgers: Sequence[Ledger], batch: BatchArrays, mark: int, epoch: int) -> int:
    """Write a decoded batch into the ledgers of a context; return the next free mark."""
    tokens, seq = batch.token.tolist(), batch.seq.tolist()
    end = mark + len(tokens)
    flags = [0] * (len(tokens) - 1) + [1] if batch.logits is None else batch.logits.tolist()
    if batch.counts is not None:
        for place, (token, flag, (pos, ids)) in enumerate(
            zip(tokens, flags, positions_and_sequences(batch), strict=True)
        ):
            for each in ids:
                ledger = ledgers[each]
                ledger.append(token, pos, mark + place)
                ledger.logits_at, ledger.logits_epoch = (place, epoch) if flag else (-1, -1)
    elif len(seq) > 1 and seq.count(seq[0]) == len(seq):
        # A piece of one prompt is added as a list, because single entries are slow.
        ledger = ledgers[seq[0]]
        ledger.extend(tokens, batch.pos.tolist(), range(mark, end))
        ledger.logits_at, ledger.logits_epoch = (len(seq) - 1, epoch) if flags[-1] else (-1, -1)
    else:
        places = zip(seq, tokens, batch.pos.tolist(), flags, strict=True)
        for place, (each, token, pos, flag) in enumerate(places):
            ledger = ledgers[each]
            ledger.append(token, pos, mark + place)
            ledger.logits_at, ledger.logits_epoch = (place, epoch) if flag else (-1, -1)
    return end


def record_step(ledgers: Sequence[Ledger], tokens: Iterable[int], mark: int, epoch: int) -> None:
    """Add one decoded token with logits to each ledger; their marks start at ``mark``."""
    # This runs between two decodes, so it must be fast.
    for place, (ledger, token) in enumerate(zip(ledgers, tokens, strict=True)):
        pos = ledger.next
        ledger.tokens.append(token)
        ledger.positions.append(pos)
        ledger.marks.append(mark + place)
        ledger.next = pos + 1
        ledger.logits_at, ledger.logits_epoch = place, epoch
