"""Do random operations to a context as its users would, and prove each of them.

The arguments of an operation are drawn from a number of its own and what the ledger has. Around
everything that must not touch K and V stand their bytes, read from the sequence states; `verify`
compares logits with a reference that decoded everything anew, and with restored states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import Status
from pyllamakv.errors import ScenarioFailed
from pyllamakv.harness import rows
from pyllamakv.harness.player import word
from pyllamakv.harness.proof import Proof
from pyllamakv.harness.subject import Subject

if TYPE_CHECKING:
    from pyllamakv.harness.feeding import Feed
    from pyllamakv.runtime.context import Context

#: Every operation, and how often it comes.
WEIGHTS: Mapping[str, int] = {
    "decode": 12, "turns": 4, "prefill": 4, "brim": 10, "cancel": 6,
    "cut": 4, "thin": 8, "trim": 2, "drop": 1, "keep": 1, "clear": 1, "fork": 5,
    "slide": 5, "shift": 4, "divide": 2, "update": 1,
    "save": 3, "restore": 5, "defrag": 5, "verify": 5,
}  # fmt: skip


class Operations:
    """Do operations on ``context``; ``other`` is one like it, which states are restored into.

    ``heals`` holds the library to it that a decode finds its cells whenever enough are free, and
    that a defragmentation leaves none between the used. ``script`` has what was done.
    """

    def __init__(self, context: Context, other: Context, *, heals: bool = True) -> None:
        self.subject = Subject(context)
        self.ledger = self.subject.ledger
        self.proof = Proof(self.subject, other)
        self.heals = heals
        self.script: list[str] = []
        self._kept: dict[str, rows.Rows] = {}
        self._chance = Random()
        names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "flash_attn", "type_k", "type_v")
        self._say("context", **{name: getattr(context.params, name) for name in names})

    def do(self, name: str, number: int) -> None:
        """Do one operation and compare cells and ledgers; KvError when something is wrong."""
        self._chance = Random(number)
        getattr(self, f"_{name}")()
        self.subject.check_cells()

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
        if status == Status.OK and piece:
            self._fail(f"a prefill of {len(tokens)} tokens ended after {done}")

    def _brim(self, *, aborts: bool = False) -> None:
        """Decode about as many tokens as there are free cells, or too many."""
        n = max(2, min(self.subject.info.n_batch, self.subject.free + self._chance.randint(-4, 8)))
        one, two = self._chance.sample(self._all, 2)
        part = self._chance.randint(1, n - 1)
        feeds = {one: self._tokens(part), two: self._tokens(n - part)}
        feed = self.subject.feed(feeds, interleave=self._chance.random() < 0.5)
        self._feed(feed, aborts=aborts)

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
        if src != dst:
            positions = self.subject.sequences[src].positions
            length = self._chance.randint(0, len(positions))
            end = positions[length] if length < len(positions) else None
            self._say("remove", seq=dst)
            self._say("copy", seq=src, into=dst, to=end)
            with self.proof.unchanged("a fork", dst):
                self.subject.fork(src, dst, length)

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
            rows.compare({seq: saved}, self.proof.rows(seq), "a restore")

    def _defrag(self) -> None:
        self._say("defrag")
        before = self._order()
        with self.proof.unchanged("a defragmentation"):
            self.subject.runtime.kv.defrag()
        snapshot = self.subject.snapshot()
        if self.heals and snapshot is not None and snapshot.stats.used_max > snapshot.stats.used:
            self._fail(f"a defragmentation left holes before cell {snapshot.stats.used_max}")
        # The default is the plan that moves least.
        if self.subject.params.defrag_plan and self._order() != before:
            self._fail("a plan that keeps the order of cells has changed it")

    def _verify(self) -> None:
        self._say("verify")
        self.proof.check_logits()

    # Underneath...

    @property
    def _all(self) -> range:
        return range(self.subject.info.n_seq_max)

    def _order(self) -> list[tuple[list[int], list[list[int]]]]:
        """Return positions and sequences of the used cells, in their order."""
        snapshot = self.subject.snapshot()
        streams = snapshot.streams if snapshot is not None else ()
        return [(each.pos[each.used].tolist(), each.seqs[each.used].tolist()) for each in streams]

    def _one(self) -> int:
        """Choose a sequence that has tokens, if any has."""
        return self._chance.choice(self.ledger.sequences or self._all)

    def _ends(self, seq: int) -> tuple[int, int]:
        """Return what sequences must have in common to share tokens, from 0.3.10 on the first."""
        positions = self.subject.sequences[seq].positions
        return (positions[0], positions[-1]) if positions else (-1, -1)

    def _tokens(self, n: int) -> list[int]:
        return [self._chance.randrange(self.subject.n_vocab) for _ in range(n)]

    def _some(self, most: int) -> Feed:
        """Return ``most`` tokens at most, for up to three lanes, some of which sequences share."""
        feeds: dict[tuple[int, ...], list[int]] = {}
        left, lanes = set(self._all), self._chance.randint(1, 3)
        while left and len(feeds) < lanes:
            seq = self._chance.choice(sorted(left))
            alike = [each for each in sorted(left) if self._ends(each) == self._ends(seq)]
            shared = {seq, *self._chance.sample(alike, min(len(alike), 3))}
            owners = tuple(sorted(shared if self._chance.random() < 0.3 else {seq}))
            left.difference_update(owners)
            feeds[owners] = self._tokens(self._chance.randint(1, most // 3))
        return self.subject.feed(feeds, interleave=self._chance.random() < 0.5)

    def _feed(self, feed: Feed, *, aborts: bool = False) -> None:
        """Decode a batch, which must do all that it says or nothing."""
        n, free = len(feed.token), self.subject.free
        self._say_feed(feed)
        with self.proof.unchanged("a decode"):
            status = self.subject.decode(feed, expect=None)
        if status != Status.ABORTED or not aborts:
            self._judge(status, n, free)

    def _judge(self, status: int, n: int, free: int) -> None:
        """Compare how a decode of ``n`` tokens ended with what ``free`` cells allow."""
        expected = Status.OK if n <= free else Status.NO_SLOT
        if status != expected and (self.heals or status != Status.NO_SLOT):
            self._fail(
                f"a decode of {n} tokens with {free} free cells ended with {word(status)}, "
                f"expected {word(expected)}"
            )
        if status == Status.NO_SLOT and (self.subject.cause == "full") != (n > free):
            self._fail(f"the cause of no slot is {self.subject.cause}, of {n} tokens, {free} free")

    def _remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        self._say("remove", seq=seq, **{"from": p0, "to": None if p1 < 0 else p1})
        self.subject.remove(seq, p0, p1)

    def _move(self, op: str, seq: int, p0: int, by: int) -> None:
        """Shift or divide positions from ``p0`` on, where every sequence keeps its order."""
        for each in self.ledger.sequences:
            mine = sorted((c for c in self.ledger.cells if each in c.seqs), key=lambda c: c.pos)
            moved = [(c.pos + by if op == "shift" else c.pos // by) for c in mine]
            stays = [c.pos < p0 or seq not in c.seqs for c in mine]
            new = [c.pos if s else pos for c, s, pos in zip(mine, stays, moved, strict=True)]
            if new[0] < 0 or any(one >= two for one, two in pairwise(new)):
                return
        if self.subject.info.can_shift:
            self._say(op, seq=seq, by=by, **{"from": p0})
            getattr(self.subject, op)(seq, p0, -1, by)

    def _say_feed(self, feed: Feed) -> None:
        feeds: dict[str, list[int]] = {}
        for token, owners in zip(feed.token.tolist(), feed.owners, strict=True):
            feeds.setdefault("+".join(map(str, owners)), []).append(token)
        woven = len(set(feed.owners[: len(feeds)])) == len(feeds) > 1
        self._say("decode", feed=feeds, **({"interleave": True} if woven else {}), expect="any")

    def _say(self, op: str, **words: Any) -> None:
        self.script.append(json.dumps({"op": op, **words}))

    def _fail(self, message: str) -> None:
        raise ScenarioFailed(message, failure="claim")
