"""Check that a shift rotated every key by the distance its position moved, bit for bit.

A shift is pending until a decode or an update rotates the keys, row by row: neither the place of a
cell nor the number of shifts affects the result. So the keys must equal those of a reference: the
same state in a separate context, shifted once by the total, with nothing else in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pyllamakv.runtime import state_parser
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.player import Step

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.state_parser import SequenceState
    from pyllamakv.scenarios.cell_ledger import Cell
    from qa.random_operations.context_player import ContextPlayer


@dataclass(frozen=True)
class _Held:
    """A sequence before its shift: its state, and its cells by position."""

    state: bytes
    cells: tuple[tuple[int, Cell], ...]


class RopeShiftCheck:
    """Check the shifts of ``subject``; references are in ``other``. ``proved`` counts sequences."""

    def __init__(self, subject: ContextPlayer, other: Context) -> None:
        self.subject = subject
        self.other = other
        self.waits = False
        self.proved = 0
        self._held: dict[int, _Held] = {}

    @property
    def pending(self) -> bool:
        """Return whether a shift is pending: positions are new, and keys old."""
        snapshot = self.subject.snapshot()
        return snapshot is not None and any(each.shift.any() for each in snapshot.streams)

    def begin(self, *, watching: bool) -> None:
        """Save the sequences before a shift, unless an earlier one is still pending."""
        self.settle()
        if self.waits:
            return
        self.waits = True
        if not watching or self.subject.snapshot() is None:
            return
        native, cells = self.other.native, self.subject.ledger.cells
        for seq in self.subject.ledger.sequences:
            mine = sorted(((c.pos, c) for c in cells if seq in c.seqs), key=lambda each: each[0])
            self._held[seq] = _Held(native.state_save(self.subject.context, seq), tuple(mine))

    def settle(self) -> None:
        """Compare with references once no shift is pending. Raises ScenarioFailed ("data")."""
        if not self.waits or self.pending:
            return
        self.waits = False
        held, self._held = self._held, {}
        # A failed decode may have rotated the keys, which the reference does not repeat, and
        # quantized keys are rounded at each rotation: with equal numbers of rotations, logits
        # differ by at most 0.03, otherwise by up to 1.2 (measured, 100 operations each).
        self.subject.steps.append(Step("update", ()))
        there = {id(cell) for cell in self.subject.ledger.cells}
        for seq, each in held.items():
            left = [(was, c) for was, c in each.cells if id(c) in there and seq in c.seqs]
            if left:
                expected = self._twin(each, left)
                now = kv_rows.read(self.other.native, self.subject.context, [seq])
                kv_rows.compare({seq: expected}, now, "a shift")
                self.proved += 1

    def _twin(self, held: _Held, left: list[tuple[int, Cell]]) -> SequenceState:
        """Return K and V of the remaining tokens of a sequence, shifted alone."""
        native, context = self.other.native, self.other.handle
        self.other.clear()
        with self.other.sequence() as twin:
            native.state_load(context, twin.id, held.state)
            kept = {was for was, _ in left}
            for was, _ in held.cells:
                if was not in kept:
                    native.seq_rm(context, twin.id, was, was + 1)
            # The order is kept, so no positions collide: downward shifts start with the first cell.
            runs = [
                (by, [was for was, _ in run])
                for by, run in groupby(left, key=lambda each: each[1].pos - each[0])
            ]
            down = [run for run in runs if run[0] < 0]
            up = [run for run in reversed(runs) if run[0] > 0]
            for by, places in (*down, *up):
                native.seq_add(context, twin.id, places[0], places[-1] + 1, by)
            native.update(context)
            return state_parser.parse(native.state_save(context, twin.id))
