"""Choose an operation's arguments from the ledger, run it, and check the result.

The building blocks of `operations`: batches for sequences that may share them, removals, moves of
positions. The arguments of an operation come from its own random number.
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
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.cell_ledger import reusable_cells
from pyllamakv.scenarios.player import word
from qa.random_operations.content_check import ContentCheck
from qa.random_operations.context_player import ContextPlayer
from qa.random_operations.task import CheckCounts

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.scenarios.batch_composition import BatchRows

#: Bound of the random numbers.
NUMBERS = 1 << 16


class OperationBase:
    """Operate on ``context``; states are restored into ``other``, a similar one.

    ``heals``: every decode must succeed if enough cells are free, and a defragmentation must leave
    no holes. Around a share of ``watched`` of the operations, K and V are compared by their bytes;
    cells and ledgers always are. ``again`` opens the context with the content of its file.
    ``script`` has the performed operations, ``done`` how often each operation ``acted``, and
    ``ended`` counts the results of decodes.
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
        """Run one operation with its random number, and compare cells and ledgers."""
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
    def checks(self) -> CheckCounts:
        """Return the counts of comparisons."""
        proof = self.proof
        return CheckCounts(proof.compared, proof.logits, proof.exact, proof.turning.proved)

    @property
    def _all(self) -> range:
        return range(self.subject.info.n_seq_max)

    @property
    def _states(self) -> bool:
        """Return whether the memory keeps states, which cannot be shared or removed in part."""
        return self.subject.info.memory.keeps_states

    def _order(self) -> list[tuple[list[int], list[list[int]]]]:
        """Return positions and sequences of the used cells, in their order."""
        snapshot = self.subject.snapshot()
        streams = snapshot.streams if snapshot is not None else ()
        return [(each.pos[each.used].tolist(), each.seqs[each.used].tolist()) for each in streams]

    def _one(self) -> int:
        """Choose a sequence that has tokens, None if there is none."""
        return self._chance.choice(self.ledger.sequences or self._all)

    def _ends(self) -> list[tuple[int, ...]]:
        """Return what sequences must have in common to share tokens.

        Since 0.3.10 this includes the first position. In a memory with a sliding window, llama.cpp
        checks the cells of that cache, while the reference may have more: a sequence that lost
        cells shares with none.
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
        """Return at most ``most`` tokens for up to three groups of sequences."""
        feeds: dict[tuple[int, ...], list[int]] = {}
        left, lanes, ends = set(self._all), self._chance.randint(1, 3), self._ends()
        while left and len(feeds) < lanes:
            seq = self._chance.choice(sorted(left))
            alike = [each for each in sorted(left) if ends[each] == ends[seq]]
            shared = {seq, *self._chance.sample(alike, min(len(alike), 3))}
            together = self._chance.random() < 0.3 and not self._states
            together = together and not self.ledger.streams
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
        """Decode a batch, which must succeed completely or have no effect; return the status.

        If states are kept, some releases cannot create a sequence after another was removed.
        """
        n, free = self.subject.demand(feed)
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
            self._judge(status, n, free, feed)
        return status

    def _judge(self, status: int, n: int, free: int, feed: BatchRows | None = None) -> None:
        """Compare the result of a decode of ``n`` tokens with the number of ``free`` cells.

        In streams, these are the numbers of one sequence of the batch ``feed``.
        """
        lacks = n > free or (status == DecodeStatus.NO_SLOT and self._exceeds_window(n, feed))
        expected = DecodeStatus.NO_SLOT if lacks else DecodeStatus.OK
        if status != expected and (self.heals or status != DecodeStatus.NO_SLOT):
            self._fail(
                f"a decode of {n} tokens with {free} free cells ended with {word(status)}, "
                f"expected {word(expected)}",
                status=int(expected),
            )
        if status == DecodeStatus.NO_SLOT and (self.subject.cause == "full") != lacks:
            self._fail(f"the cause of no slot is {self.subject.cause}, of {n} tokens, {free} free")

    def _exceeds_window(self, n: int, feed: BatchRows | None) -> bool:
        """Return whether a batch of ``n`` tokens exceeds the cells of a sliding-window cache.

        It may be smaller than the full cache, and sequences that share its cells keep them.
        """
        snapshot = self.subject.snapshot() if self.subject.info.n_swa else None
        if snapshot is None:
            return n > self.subject.n_cells
        wanted = Counter({0: n})
        if self.ledger.streams and feed is not None:
            wanted = Counter(seq for (seq,) in feed.owners)
        return any(
            wanted[each.info.stream]
            > reusable_cells(
                kv_rows.stream_contents(each), each.stats.size, self.subject.info.n_swa
            )
            for each in snapshot.streams
            if each.swa
        )

    def _remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove positions; some memories refuse to remove a part."""
        self._say("remove", seq=seq, **{"from": p0, "to": None if p1 < 0 else p1})
        try:
            self.subject.remove(seq, p0, p1)
        except PartialRemovalRefused:
            self._refused()

    def _refused(self) -> None:
        """Record that a part of a sequence was refused, which is a failure for attention cells."""
        self.script.pop()
        if self.subject.info.memory is MemoryType.ATTENTION:
            self._fail("the removal of a part of a sequence was refused")

    def _move(self, op: str, seq: int, p0: int, by: int) -> None:
        """Shift or divide positions since ``p0``, such that every sequence keeps its order."""
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
        """Raise ScenarioFailed; ``promise`` is the required result."""
        evidence = {"promise": promise} if promise else None
        raise ScenarioFailed(message, failure="claim", evidence=evidence)
