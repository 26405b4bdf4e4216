"""The library's count of used cells stays exact while cells are freed, shared and moved.

If the count is wrong, a defragmentation looks for used cells that do not exist, and asserts.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from pyllamakv.errors import Unsupported
from pyllamakv.scenarios.scenario import PLAIN, SCATTERED, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: Maximum number of used cells. A slot and a worst-case graph always fit, so that only a wrong
#: count can fail.
MOST = 192
SEQUENCES = range(6)


def run(lab: Lab) -> None:
    """Run a fixed mix of operations, and compare the cells with the ledger after each one."""
    player = lab.player(512, n_ubatch=32)
    mix = Mix(player, Random(14059))
    for step in range(90):
        mix.step()
        player.check_cells()
        if step % 30 == 29:
            lab.picture(player, f"after {step + 1} operations")
            lab.verify(player)


class Mix:
    """Choose operations after which every sequence can still be decoded."""

    def __init__(self, player: Player, draw: Random) -> None:
        self.player = player
        self.draw = draw
        self.kept = ""
        self.shifted = False

    def step(self) -> None:
        """Run one operation, after a decode if too few cells are used."""
        ledger = self.player.ledger
        if ledger.used < MOST // 3:
            self._decode()
        ways = [self._decode, self._decode, self._decode, self._remove, self._copy, self._keep]
        ways += [self._slide, self._sink, self._divide, self._save, self._restore, self._defrag]
        self.draw.choice(ways)()

    def _decode(self) -> None:
        room = max(2, MOST - self.player.ledger.used)
        some = self.draw.sample(SEQUENCES, 2)
        feeds = {seq: self.draw.randint(1, max(1, min(24, room // 2))) for seq in some}
        self.player.decode(feeds, interleave=True)
        self.shifted = False

    def _remove(self) -> None:
        seq, end = self._any()
        first = self.draw.randrange(end)
        self.player.remove(seq, first, self.draw.randint(first + 1, end))

    def _copy(self) -> None:
        (seq, end), other = self._any(), self.draw.choice(SEQUENCES)
        if other != seq:
            self.player.remove(other)
            self.player.copy(seq, other, 0, self.draw.randint(1, end))

    def _keep(self) -> None:
        if not self.draw.randrange(3):
            self.player.keep(self._any()[0])

    def _slide(self) -> None:
        """Remove a part and shift the rest down, as llama.cpp's context shift does."""
        seq, end = self._alone()
        if end >= 12:
            cut = end // 3
            self.player.remove(seq, 2, 2 + cut)
            self.player.shift(seq, 2 + cut, -1, -cut)
            self.shifted = True

    def _sink(self) -> None:
        """Shift everything down. Cells below position zero are freed for all their sequences."""
        seq, end = self._any()
        self.player.shift(seq, -1, -1, -max(1, end // 4))
        self.shifted = True

    def _divide(self) -> None:
        """Divide the positions by two, after every second one was removed."""
        seq, end = self._alone()
        for pos in range(1, end, 2):
            self.player.remove(seq, pos, pos + 1)
        if end:
            self.player.divide(seq, -1, -1, 2)
            self.shifted = True

    def _save(self) -> None:
        self._decode()
        self.kept = f"state {len(self.player.saved)}"
        self.player.save(self._any()[0], self.kept)

    def _restore(self) -> None:
        if self.kept:
            self._decode()
            self.player.restore(self.draw.choice(SEQUENCES), self.kept)

    def _defrag(self) -> None:
        # Where upstream has removed defragmentation, the other operations are still tested.
        with suppress(Unsupported):
            if self.shifted:
                self.player.defrag()
            else:
                with self.player.unchanged():
                    self.player.defrag()
            self.shifted = False

    def _any(self) -> tuple[int, int]:
        """Return a sequence with cells, and the position after its last one."""
        ledger = self.player.ledger
        seq = self.draw.choice(ledger.sequences)
        return seq, ledger.next(seq)

    def _alone(self) -> tuple[int, int]:
        """Return a sequence without shared cells, and its next position (0 if none)."""
        ledger = self.player.ledger
        shared = {seq for cell in ledger.cells if len(cell.seqs) > 1 for seq in cell.seqs}
        alone = [seq for seq in ledger.sequences if seq not in shared]
        seq = self.draw.choice(alone or [0])
        return seq, ledger.next(seq) if alone else 0


SCENARIO = Scenario(
    id="used-count",
    kind="guard",
    claim="The library's count of used cells is exact after every operation.",
    issue="ggml-org/llama.cpp#14059",
    run=run,
    settings=(*PLAIN, SCATTERED),
)
