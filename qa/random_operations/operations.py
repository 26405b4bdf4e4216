"""Run random operations on a context as users would, and check each of them.

Around operations that must not change K and V, their bytes are compared, read from the sequence
states; `verify` compares logits with a reference that decoded all tokens, and with restored states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus, DefragPlan, MemoryType
from pyllamakv.errors import PartialRemovalRefused
from pyllamakv.scenarios import kv_rows
from qa.random_operations.operation_base import OperationBase

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

#: All operations, with their weights.
WEIGHTS: Mapping[str, int] = {
    "decode": 12, "turns": 4, "prefill": 4, "brim": 10, "boundaries": 1, "cancel": 6,
    "cut": 4, "thin": 8, "trim": 2, "drop": 1, "keep": 1, "clear": 1, "fork": 5,
    "slide": 5, "shift": 4, "divide": 2, "update": 1,
    "save": 3, "restore": 5, "reload": 2, "reopen": 2,
    "defrag": 5, "release": 2, "verify": 5,
}  # fmt: skip

#: Operations that some memories do not support: parts of sequences, cells, shifted positions.
PARTS = ("cut", "thin", "trim", "slide", "shift", "divide")
CELLS = ("brim", "boundaries", "defrag")
MOVES = ("slide", "shift", "divide")


def impossible(context: Context, *, reopens: bool = False) -> set[str]:
    """Return the operations that a context does not support.

    A window drops cells by position. A shift that brings positions close may drop cells, also in a
    cache of full size; therefore no positions are shifted there.
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
    """Run operations by their names in `WEIGHTS`."""

    def __init__(self, context: Context, other: Context, **options: Any) -> None:
        super().__init__(context, other, **options)
        self._without = impossible(context, reopens=self._again is not None)
        self._kept: dict[str, kv_rows.Rows] = {}

    def do(self, name: str, number: int) -> None:
        """Run one operation and compare cells and ledgers. Raises KvError for a failure."""
        if name not in self._without:
            self.acted = False
            try:
                self._act(getattr(self, f"_{name}"), number)
            finally:
                # An operation without effect is not counted.
                if self.acted:
                    self.done[name] += 1

    # Operations that add tokens...

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
            # A prompt may be refused at once, but not a single piece.
            for start in range(0, len(tokens), size):
                self._feed(self.subject.feed({seq: tokens[start : start + size]}))
            return
        free, before = self.subject.room(seq), len(self.subject.sequences[seq])
        # A prompt with more tokens than cells is refused before its first piece.
        tokens = tokens[: self.subject.size_for(seq) - before]
        if not tokens:
            return
        # The first piece without a slot is the last.
        for start in range(0, min(len(tokens), free // size * size + 1), size):
            self._say("decode", feed={seq: tokens[start : start + size]}, expect="any")
        with self.proof.unchanged("a prefill"):
            status = self.subject.prefill(seq, tokens)
        # A failing piece leaves those before it.
        done = len(self.subject.sequences[seq]) - before
        piece = min(len(tokens) - done, size)
        self._judge(status, piece, free - done)
        if status == DecodeStatus.OK and piece:
            self._fail(f"a prefill of {len(tokens)} tokens ended after {done}")

    def _brim(self, *, aborts: bool = False) -> None:
        """Decode about as many tokens as there are free cells, or too many."""
        most = self.subject.info.n_batch
        if self.ledger.streams:
            one, two = self._chance.sample(self._all, 2)
            n = self._near(one, most - 1)
            feeds = {one: self._tokens(n)}
            if self._chance.random() < 0.7:
                feeds[two] = self._tokens(self._near(two, most - n))
            interleave = self._chance.random() < 0.5
            self._feed(self.subject.feed(feeds, interleave=interleave), aborts=aborts)
            return
        n = min(most, self.subject.free + self._chance.randint(-4, 8))
        self._feed(self._two(max(2, n)), aborts=aborts)

    def _near(self, seq: int, most: int) -> int:
        """Return about as many tokens as a sequence's stream has free cells."""
        return max(1, min(most, self.subject.room(seq) + self._chance.randint(-4, 8)))

    def _boundaries(self) -> None:
        """Fail after each micro-batch of a batch: only a given number of them finds cells."""
        most, size = self.subject.info.n_batch, self.subject.info.n_ubatch
        filler = self._chance.choice(self._all)
        for fit in range((most - 1) // size, -1, -1):
            free = min(fit * size + self._chance.randrange(size), most - 1)
            while self.subject.room(filler) > free:
                n = min(most, self.subject.room(filler) - free)
                if self._feed(self.subject.feed({filler: self._tokens(n)})) != DecodeStatus.OK:
                    break
            if self.subject.room(filler) // size == fit:
                alone = self.ledger.streams
                feed = self.subject.feed({filler: self._tokens(most)}) if alone else self._two(most)
                self._feed(feed)
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

    # Operations that remove tokens...

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

    # Operations that move positions and sequences...

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
        if self.ledger.streams and end is not None:
            self._say("copy", seq=src, into=dst)
            self._say("update")
            self._say("remove", seq=dst, **{"from": end, "to": None})
        else:
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

    # Operations that save content...

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
        room = self.subject.room(seq) + sum(cell.seqs == {seq} for cell in self.ledger.cells)
        if needed <= room:  # else the library would not even be asked
            self._say("restore", seq=seq, **{"as": name}, expect="any")
        with self.proof.unchanged("a restore", seq):
            done = self.subject.restore(seq, name, must=self.heals and needed <= room)
        if done and not self.proof.pending:
            (saved,) = self._kept[name].values()
            self.proof.compare({seq: saved}, "a restore")

    def _reload(self) -> None:
        """Save everything, empty the cache, and restore it: sequences no longer share cells."""
        there = self.ledger.sequences
        total = sum(len(self.ledger.of(seq)) for seq in there)
        if not self.ledger.streams and total > self.subject.n_cells:
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
            # Only these are restored; other states are selected by name.
            del self.subject.saved[f"all {seq}"]
        self.proof.compare(before, "a restore of all sequences")

    def _reopen(self) -> None:
        """Close a context with a cache file, and continue with its content."""
        assert self._again is not None
        self._say("note", text="closed and reopened")
        with self.proof.unchanged("a reopen"):
            self.subject.reopen(self._again)

    # Operations that move cells...

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
        # The default plan moves the fewest cells.
        if self.subject.params.defrag_plan == DefragPlan.ORDERED and self._order() != before:
            self._fail("the plan `ordered` changed the order of cells")

    def _release(self) -> None:
        """Trim mapped memory after the last used cell."""
        self._say("note", text="trimmed")
        with self.proof.unchanged("a trim"):
            self.subject.runtime.kv.trim()

    def _verify(self) -> None:
        self._say("verify")
        self.proof.check_logits()
