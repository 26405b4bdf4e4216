"""Draw what an operation does out of what the ledger has, say it, and judge how it ended.

What `operations` does is made of these: batches for sequences that may share them, removals, moves
of positions. The arguments of an operation come from a number of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus, MemoryType
from pyllamakv.errors import PartialRemovalRefused, ScenarioFailed, Unsupported
from pyllamakv.runtime import swa
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.player import word
from qa.random_operations.content_check import ContentCheck
from qa.random_operations.context_player import ContextPlayer

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.scenarios.batch_composition import BatchRows

#: What numbers are drawn from.
NUMBERS = 1 << 16


class OperationBase:
    """Act on ``context``; ``other`` is one like it, which states are restored into.

    ``heals`` holds the library to it that a decode finds its cells whenever enough are free, and
    that a defragmentation leaves none between the used. Around a share of ``watched`` of the
    operations K and V are compared by their bytes; cells and ledgers always are. ``again`` opens
    the context once more, which goes on with what its file kept. ``script`` has what was done,
    ``done`` how often each operation ``acted``, and ``ended`` how often decodes ended how.
    """

    def __init__(
        self,
        context: Context,
        other: Context,
        *,
        heals: bool = True,
        watched: float = 1.0,
        again: Callable[[], Context] | None = None,
    ) -> None:
        self.subject = ContextPlayer(context)
        self.ledger = self.subject.ledger
        self.proof = ContentCheck(self.subject, other)
        self.heals = heals
        self.script: list[str] = []
        self.acted = False
        self.done: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._again = again
        self._watched = watched * NUMBERS
        self._chance = Random()
        names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "flash_attn", "type_k", "type_v")
        self._say("context", **{name: getattr(context.params, name) for name in names})

    def _act(self, operation: Callable[[], None], number: int) -> None:
        """Do one operation with what its number draws, and compare cells and ledgers."""
        self._chance = Random(number)
        self.proof.watching = number < self._watched
        operation()
        self.proof.turning.settle()
        self.subject.check_cells(ends=self.proof.watching)

    def close(self) -> None:
        """Close the context and that of the reference."""
        try:
            self.proof.close()
        finally:
            self.subject.close()

    @property
    def _all(self) -> range:
        return range(self.subject.info.n_seq_max)

    @property
    def _states(self) -> bool:
        """Return whether the memory keeps states, which have no parts to share or to remove."""
        return self.subject.info.memory.keeps_states

    def _order(self) -> list[tuple[list[int], list[list[int]]]]:
        """Return positions and sequences of the used cells, in their order."""
        snapshot = self.subject.snapshot()
        streams = snapshot.streams if snapshot is not None else ()
        return [(each.pos[each.used].tolist(), each.seqs[each.used].tolist()) for each in streams]

    def _one(self) -> int:
        """Choose a sequence that has tokens, if any has."""
        return self._chance.choice(self.ledger.sequences or self._all)

    def _ends(self) -> list[tuple[int, ...]]:
        """Return what sequences must have in common to share tokens, from 0.3.10 on the first.

        Of a memory with a sliding window llama.cpp asks what that cache still has, where the
        reference may have more: a sequence of which a part was given away shares with none.
        """
        snapshot = self.subject.snapshot() if self.subject.info.n_swa else None
        there = None if snapshot is None else kv_rows.sliding(snapshot)
        ends: list[tuple[int, ...]] = []
        for seq in self.subject.sequences:
            own = seq.positions
            whole = there is None or len(there.get(seq.id, ())) == len(own)
            ends.append((*own[:1], *own[-1:]) if whole else (seq.id,))
        return ends

    def _tokens(self, n: int) -> list[int]:
        return [self._chance.randrange(self.subject.n_vocab) for _ in range(n)]

    def _some(self, most: int) -> BatchRows:
        """Return ``most`` tokens at most, for up to three lanes, some of which sequences share."""
        feeds: dict[tuple[int, ...], list[int]] = {}
        left, lanes, ends = set(self._all), self._chance.randint(1, 3), self._ends()
        while left and len(feeds) < lanes:
            seq = self._chance.choice(sorted(left))
            alike = [each for each in sorted(left) if ends[each] == ends[seq]]
            shared = {seq, *self._chance.sample(alike, min(len(alike), 3))}
            together = self._chance.random() < 0.3 and not self._states
            owners = tuple(sorted(shared if together else {seq}))
            left.difference_update(owners)
            feeds[owners] = self._tokens(self._chance.randint(1, most // 3))
        return self.subject.feed(feeds, interleave=self._chance.random() < 0.5)

    def _two(self, n: int) -> BatchRows:
        """Return ``n`` tokens for two sequences."""
        one, two = self._chance.sample(self._all, 2)
        part = self._chance.randint(1, n - 1)
        feeds = {one: self._tokens(part), two: self._tokens(n - part)}
        return self.subject.feed(feeds, interleave=self._chance.random() < 0.5)

    def _feed(self, feed: BatchRows, *, aborts: bool = False) -> int:
        """Decode a batch, which must do all that it says or nothing; return the status.

        Where states are kept, some releases begin no sequence after another was removed.
        """
        n, free = len(feed.token), self.subject.free
        self._say_feed(feed)
        try:
            with self.proof.unchanged("a decode"):
                status = self.subject.decode(feed, expect=None)
        except Unsupported:
            if not self._states:
                raise
            self.script.pop()
            self.ended["refused"] += 1
            return DecodeStatus.ABORTED
        self.ended[word(status)] += 1
        if status != DecodeStatus.ABORTED or not aborts:
            self._judge(status, n, free)
        return status

    def _judge(self, status: int, n: int, free: int) -> None:
        """Compare how a decode of ``n`` tokens ended with what ``free`` cells allow."""
        lacks = n > free or (status == DecodeStatus.NO_SLOT and n > self._window())
        expected = DecodeStatus.NO_SLOT if lacks else DecodeStatus.OK
        if status != expected and (self.heals or status != DecodeStatus.NO_SLOT):
            self._fail(
                f"a decode of {n} tokens with {free} free cells ended with {word(status)}, "
                f"expected {word(expected)}",
                status=int(expected),
            )
        if status == DecodeStatus.NO_SLOT and (self.subject.cause == "full") != lacks:
            self._fail(f"the cause of no slot is {self.subject.cause}, of {n} tokens, {free} free")

    def _window(self) -> int:
        """Count the cells that a sliding-window cache has for more tokens.

        It may be smaller than what it stands beside, and sequences that share its cells keep them.
        """
        snapshot = self.subject.snapshot() if self.subject.info.n_swa else None
        streams = snapshot.streams if snapshot is not None else ()
        left = [swa.reusable_cells(each, self.subject.info.n_swa) for each in streams if each.swa]
        return min(left, default=self.subject.n_cells)

    def _remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove positions; some memories keep a sequence whole, and say so."""
        self._say("remove", seq=seq, **{"from": p0, "to": None if p1 < 0 else p1})
        try:
            self.subject.remove(seq, p0, p1)
        except PartialRemovalRefused:
            self._refused()

    def _refused(self) -> None:
        """Record that a part of a sequence was refused, which cells of attention never are."""
        self.script.pop()
        if self.subject.info.memory is MemoryType.ATTENTION:
            self._fail("the removal of a part of a sequence was refused")

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
            self.proof.turning.begin(watching=self.proof.watching)
            self._say(op, seq=seq, by=by, **{"from": p0})
            getattr(self.subject, op)(seq, p0, -1, by)

    def _say_feed(self, feed: BatchRows) -> None:
        feeds: dict[str, list[int]] = {}
        for token, owners in zip(feed.token.tolist(), feed.owners, strict=True):
            feeds.setdefault("+".join(map(str, owners)), []).append(token)
        woven = len(set(feed.owners[: len(feeds)])) == len(feeds) > 1
        self._say("decode", feed=feeds, **({"interleave": True} if woven else {}), expect="any")

    def _say(self, op: str, **words: Any) -> None:
        self.acted = True
        self.script.append(json.dumps({"op": op, **words}))

    def _fail(self, message: str, **promise: Any) -> None:
        """Raise ScenarioFailed; ``promise`` is the result that should have come instead."""
        evidence = {"promise": promise} if promise else None
        raise ScenarioFailed(message, failure="claim", evidence=evidence)
