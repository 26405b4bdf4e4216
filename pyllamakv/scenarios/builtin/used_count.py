"""Everything that frees, shares and moves cells, in a long mix: the library's own count holds.

Where the count drifts, a defragmentation looks for used cells that are not there, and asserts.
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

#: More used cells than this are never asked for: there is always a slot, and room for a graph of
#: the worst case behind it, so that nothing but the count decides.
MOST = 192
SEQUENCES = range(6)


def run(lab: Lab) -> None:
    """Play a mix that is always the same; the cells are compared with the ledger at each step."""
    player = lab.player(512, n_ubatch=32)
    mix = Mix(player, Random(14059))
    for step in range(90):
        mix.step()
        player.check_cells()
        if step % 30 == 29:
            lab.picture(player, f"after {step + 1} operations")
            lab.verify(player)


class Mix:
    """Choose operations that leave every sequence with positions that a decode can continue."""

    def __init__(self, player: Player, draw: Random) -> None:
        self.player = player
        self.draw = draw
        self.kept = ""
        self.shifted = False

    def step(self) -> None:
        """Do one operation, after a decode where too little is left to work on."""
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
        """Forget a part and move what is behind it up, as a context that is full does."""
        seq, end = self._alone()
        if end >= 12:
            cut = end // 3
            self.player.remove(seq, 2, 2 + cut)
            self.player.shift(seq, 2 + cut, -1, -cut)
            self.shifted = True

    def _sink(self) -> None:
        """Move everything down: what falls below zero is free, for all its owners."""
        seq, end = self._any()
        self.player.shift(seq, -1, -1, -max(1, end // 4))
        self.shifted = True

    def _divide(self) -> None:
        """Halve the positions, of which every second one was freed."""
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
        # Where upstream has no defragmentation any more, the rest of the mix still counts.
        with suppress(Unsupported):
            if self.shifted:
                self.player.defrag()
            else:
                with self.player.unchanged():
                    self.player.defrag()
            self.shifted = False

    def _any(self) -> tuple[int, int]:
        """Return a sequence that has cells, and the position behind its last."""
        ledger = self.player.ledger
        seq = self.draw.choice(ledger.sequences)
        return seq, ledger.next(seq)

    def _alone(self) -> tuple[int, int]:
        """Return a sequence that shares nothing; of none the position is 0."""
        ledger = self.player.ledger
        shared = {seq for cell in ledger.cells if len(cell.seqs) > 1 for seq in cell.seqs}
        alone = [seq for seq in ledger.sequences if seq not in shared]
        seq = self.draw.choice(alone or [0])
        return seq, ledger.next(seq) if alone else 0


SCENARIO = Scenario(
    id="used-count",
    kind="guard",
    claim="The library counts exactly the cells in use, whatever freed, shared or moved them.",
    issue="ggml-org/llama.cpp#14059",
    run=run,
    settings=(*PLAIN, SCATTERED),
)
