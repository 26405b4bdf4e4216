"""Do random operations to a context as its users would, and prove each of them.

Around what must not touch K and V stand their bytes, read from the sequence states; `verify`
compares logits with a reference that decoded everything anew, and with restored states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus, MemoryType
from pyllamakv.errors import PartialRemovalRefused
from pyllamakv.scenarios import kv_rows
from qa.random_operations.operation_base import OperationBase

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

#: Every operation, and how often it comes.
WEIGHTS: Mapping[str, int] = {
    "decode": 12, "turns": 4, "prefill": 4, "brim": 10, "boundaries": 1, "cancel": 6,
    "cut": 4, "thin": 8, "trim": 2, "drop": 1, "keep": 1, "clear": 1, "fork": 5,
    "slide": 5, "shift": 4, "divide": 2, "update": 1,
    "save": 3, "restore": 5, "reload": 2, "reopen": 2,
    "defrag": 5, "release": 2, "verify": 5,
}  # fmt: skip

#: What needs more than some memories have: parts of sequences, cells, positions that move.
PARTS = ("cut", "thin", "trim", "slide", "shift", "divide")
CELLS = ("brim", "boundaries", "defrag")
MOVES = ("slide", "shift", "divide")


def impossible(context: Context, *, reopens: bool = False) -> set[str]:
    """Return the operations that a context can do nothing for.

    A window shows what lies near in positions, and what a shift brings near may be given away, from
    a cache of full size as well: so no positions move there.
    """
    info, params = context.info, context.params
    without: set[str] = set()
    if info.memory.keeps_states:
        without.update(PARTS)
    if info.memory is MemoryType.RECURRENT:
        without.update(CELLS)
    if info.n_swa or not info.can_shift:
        without.update(MOVES)
    if not info.defrag:
        without.add("defrag")
    if not params.kv_backing:
        without.add("release")
    if not reopens:
        without.add("reopen")
    return without


class Operations(OperationBase):
    """Do operations by their names, out of `WEIGHTS`."""

    def __init__(self, context: Context, other: Context, **options: Any) -> None:
        super().__init__(context, other, **options)
        self._without = impossible(context, reopens=self._again is not None)
        self._kept: dict[str, kv_rows.Rows] = {}

    def do(self, name: str, number: int) -> None:
        """Do one operation and compare cells and ledgers; KvError when something is wrong."""
        if name not in self._without:
            self.acted = False
            try:
                self._act(getattr(self, f"_{name}"), number)
            finally:
                # What found nothing to do was not tried.
                if self.acted:
                    self.done[name] += 1

    # What adds tokens...

    def _decode(self) -> None:
        self._feed(self._some(self._chance.choice((12, self.subject.info.n_batch))))

    def _turns(self) -> None:
        some = self._chance.sample(self._all, self._chance.randint(1, 3))
        together = self._chance.random() < 0.5
        for _ in range(self._chance.randint(1, 8)):
            for seqs in [some] if together else [[seq] for seq in some]:
                self._feed(self.subject.feed({seq: self._tokens(1) for seq in seqs}))

    def _prefill(self) -> None:
        seq, size = self._chance.choice(self._all), self.subject.info.n_batch
        tokens = self._tokens(self._chance.randint(1, size * 2))
        if self._states:
            # It may refuse to begin one: pieces by themselves say so.
            for start in range(0, len(tokens), size):
                self._feed(self.subject.feed({seq: tokens[start : start + size]}))
            return
        free, before = self.subject.free, len(self.subject.sequences[seq])
        # The first piece that finds no room is the last.
        for start in range(0, min(len(tokens), free // size * size + 1), size):
            self._say("decode", feed={seq: tokens[start : start + size]}, expect="any")
        with self.proof.unchanged("a prefill"):
            status = self.subject.prefill(seq, tokens)
        # A piece that fails leaves those before it.
        done = len(self.subject.sequences[seq]) - before
        piece = min(len(tokens) - done, size)
        self._judge(status, piece, free - done)
        if status == DecodeStatus.OK and piece:
            self._fail(f"a prefill of {len(tokens)} tokens ended after {done}")

    def _brim(self, *, aborts: bool = False) -> None:
        """Decode about as many tokens as there are free cells, or too many."""
        n = min(self.subject.info.n_batch, self.subject.free + self._chance.randint(-4, 8))
        self._feed(self._two(max(2, n)), aborts=aborts)

    def _boundaries(self) -> None:
        """Fail behind every micro-batch of a batch: so many of them, and no more, find cells."""
        most, size = self.subject.info.n_batch, self.subject.info.n_ubatch
        filler = self._chance.choice(self._all)
        for fit in range((most - 1) // size, -1, -1):
            free = min(fit * size + self._chance.randrange(size), most - 1)
            while self.subject.free > free:
                n = min(most, self.subject.free - free)
                if self._feed(self.subject.feed({filler: self._tokens(n)})) != DecodeStatus.OK:
                    break
            if self.subject.free // size == fit:
                self._feed(self._two(most))
        self._remove(filler)

    def _cancel(self) -> None:
        polls = int(2 ** self._chance.uniform(0, 9))
        self._say("cancel", polls=polls)
        self.subject.cancel_after(polls)
        try:
            self._brim(aborts=True)
        finally:
            self.subject.cancel_after(-1)
            self._say("cancel", polls=-1)

    # What takes tokens away...

    def _cut(self) -> None:
        seq = self._one()
        first = self._chance.randrange(self.ledger.next(seq) + 1)
        self._remove(seq, first, first + self._chance.randint(0, 24))

    def _thin(self) -> None:
        seq = self._one()
        for pos in self.subject.sequences[seq].positions:
            if self._chance.random() < 0.4:
                self._remove(seq, pos, pos + 1)

    def _trim(self) -> None:
        seq = self._one()
        positions = self.subject.sequences[seq].positions
        length = self._chance.randint(0, len(positions))
        if length < len(positions):
            self._remove(seq, positions[length])

    def _drop(self) -> None:
        self._remove(self._one())

    def _keep(self) -> None:
        seq = self._one()
        self._say("keep", seq=seq)
        self.subject.keep(seq)

    def _clear(self) -> None:
        self._say("clear")
        self.subject.clear()

    # What moves positions and sequences...

    def _fork(self) -> None:
        src, dst = self._one(), self._chance.choice(self._all)
        if src == dst:
            return
        positions = self.subject.sequences[src].positions
        length = self._chance.randint(0, len(positions))
        if self._states:
            length = len(positions)
        end = positions[length] if length < len(positions) else None
        self._say("remove", seq=dst)
        self._say("copy", seq=src, into=dst, to=end)
        try:
            with self.proof.unchanged("a fork", dst):
                self.subject.fork(src, dst, length)
        except PartialRemovalRefused:
            self._refused()

    def _slide(self) -> None:
        seq = self._one()
        first, n = self._chance.randint(0, 8), self._chance.randint(1, 24)
        self._remove(seq, first, first + n)
        self._move("shift", seq, first + n, -n)

    def _shift(self) -> None:
        seq = self._one()
        first = self._chance.randint(0, self.ledger.next(seq))
        self._move("shift", seq, first, self._chance.randint(-9, 9))

    def _divide(self) -> None:
        seq, by = self._one(), self._chance.randint(2, 3)
        for pos in self.subject.sequences[seq].positions:
            if pos % by:
                self._remove(seq, pos, pos + 1)
        self._move("divide", seq, 0, by)

    def _update(self) -> None:
        self._say("update")
        self.subject.update()

    # What keeps content...

    def _save(self) -> None:
        seq, name = self._one(), f"state {self._chance.randint(0, 2)}"
        if self.ledger.of(seq):
            self._say("update")
            self._say("save", seq=seq, **{"as": name})
            self.subject.save(seq, name)
            self._kept[name] = self.proof.rows(seq)

    def _restore(self) -> None:
        if not self.subject.saved:
            return
        seq, name = self._chance.choice(self._all), self._chance.choice(list(self.subject.saved))
        needed = len(self.subject.saved[name][1])
        room = self.subject.free + sum(cell.seqs == {seq} for cell in self.ledger.cells)
        if needed <= room:  # else the library would not even be asked
            self._say("restore", seq=seq, **{"as": name}, expect="any")
        with self.proof.unchanged("a restore", seq):
            done = self.subject.restore(seq, name, must=self.heals and needed <= room)
        if done and not self.proof.pending:
            (saved,) = self._kept[name].values()
            self.proof.compare({seq: saved}, "a restore")

    def _reload(self) -> None:
        """Save all there is, empty the cache, and bring it back: who shared cells has own ones."""
        there = self.ledger.sequences
        if sum(len(self.ledger.of(seq)) for seq in there) > self.subject.n_cells:
            return
        self._say("update")
        self.subject.update()
        before = self.proof.rows(*there)
        for seq in there:
            self._say("save", seq=seq, **{"as": f"all {seq}"})
            self.subject.save(seq, f"all {seq}")
        self._clear()
        for seq in there:
            self._say("restore", seq=seq, **{"as": f"all {seq}"})
            self.subject.restore(seq, f"all {seq}")
            # Nothing else is restored from them: what else may be is chosen by name.
            del self.subject.saved[f"all {seq}"]
        self.proof.compare(before, "a restore of all sequences")

    def _reopen(self) -> None:
        """Close a context whose cache a file keeps, and go on with what is there."""
        assert self._again is not None
        self._say("note", text="closed, and opened again")
        with self.proof.unchanged("closing and opening again"):
            self.subject.reopen(self._again)

    # What arranges cells...

    def _defrag(self) -> None:
        self._say("defrag")
        before = self._order()
        with self.proof.unchanged("a defragmentation"):
            self.subject.runtime.kv.defrag()
        snapshot = self.subject.snapshot()
        for each in snapshot.streams if self.heals and snapshot is not None else ():
            if each.stats.used_max_p1 > each.stats.used:
                self._fail(
                    f"a defragmentation left holes before cell {each.stats.used_max_p1}",
                    holes=int(each.stats.free > 0),
                )
        # The default is the plan that moves least.
        if self.subject.params.defrag_plan and self._order() != before:
            self._fail("a plan that keeps the order of cells has changed it")

    def _release(self) -> None:
        """Give mapped memory behind the last used cell back."""
        self._say("note", text="gave memory back")
        with self.proof.unchanged("giving memory back"):
            self.subject.runtime.kv.trim()

    def _verify(self) -> None:
        self._say("verify")
        self.proof.check_logits()
