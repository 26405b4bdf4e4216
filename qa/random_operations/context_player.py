"""Run a player's operations through the runtime's classes instead of the library.

This tests guards, ledgers and policies of the runtime as well: three records of the same cells must
agree, the player's ledger, that of each sequence, and the cells themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import DecodeStatus, MemoryType
from pyllamakv.errors import (
    Cancelled,
    NoKVSlot,
    PartialRemovalRefused,
    ScenarioFailed,
    StateError,
)
from pyllamakv.runtime.batch import Batch
from pyllamakv.scenarios.batch_composition import BatchRows
from pyllamakv.scenarios.player import Player, Step

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

#: Cells of a memory with one state per sequence, of any length.
ENDLESS = 1 << 30


class ContextPlayer(Player):
    """Operate one `Context` that is otherwise unused, with all of its sequences.

    ``cause`` is the runtime's reason why the last decode found no slot.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context.native, context.model.handle, context.params, context.handle)
        self.runtime = context
        self.sequences = [context.sequence(n) for n in range(context.info.n_seq_max)]
        self.cause = ""

    @cached_property
    def n_cells(self) -> int:
        """Return the size of the cache in cells."""
        return ENDLESS if self.info.memory is MemoryType.RECURRENT else super().n_cells

    @cached_property
    def _stream_sizes(self) -> tuple[int, ...]:
        """Return the number of cells of each sequence's stream; the minimum of its caches."""
        snapshot = self.snapshot() if self.ledger.streams else None
        if snapshot is None:
            return ()
        sizes = [
            [each.stats.size for each in snapshot.streams if each.info.stream == seq]
            for seq in range(self.info.n_seq_max)
        ]
        return tuple(max(each) for each in sizes)

    def size_for(self, seq: int) -> int:
        """Return the number of cells that a sequence could use."""
        return self._stream_sizes[seq] if self._stream_sizes else self.n_cells

    def room(self, seq: int) -> int:
        """Return the number of free cells that a sequence could use."""
        if self._stream_sizes:
            return self._stream_sizes[seq] - len(self.ledger.of(seq))
        return self.free

    def demand(self, feed: BatchRows) -> tuple[int, int]:
        """Return the tokens of a batch and the free cells, in the stream that lacks most."""
        if not self._stream_sizes:
            return len(feed.token), self.free
        counts = Counter(seq for (seq,) in feed.owners)
        return max(
            ((n, self.room(seq)) for seq, n in counts.items()), key=lambda each: each[0] - each[1]
        )

    def close(self) -> None:
        """Close the context."""
        self.runtime.close()

    def reopen(self, again: Callable[[], Context]) -> None:
        """Close the context, and open another one with the content of its file."""
        self.close()
        self._step("update")
        self.runtime = again()
        self.context = self.runtime.handle
        self.sequences = [self.runtime.sequence(n) for n in range(self.info.n_seq_max)]

    def prefill(self, seq: int, tokens: list[int]) -> int:
        """Decode a prompt in pieces of n_batch and return the status; pieces before a failure stay.

        The ledger follows the number of tokens that the runtime reports.
        """
        before, status, self.cause = len(self.sequences[seq]), DecodeStatus.OK, ""
        try:
            self.sequences[seq].prefill(tokens)
        except NoKVSlot as error:
            self.cause, status = error.cause, DecodeStatus.NO_SLOT
            self._follow_emptied()
        done, size = len(self.sequences[seq]) - before, self.info.n_batch
        for start in range(0, done, size):
            feed = self.feed({seq: tokens[start : min(start + size, done)]})
            self.ledger.add(feed.token.tolist(), feed.pos.tolist(), feed.owners)
            whole = start + size >= len(tokens)
            logits = feed.read(self.native, self.context, self.n_vocab) if whole else {}
            self.steps.append(Step("decode", (feed,), logits))
        return status

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions of a sequence."""
        self.sequences[seq].remove(_bound(p0), _bound(p1))
        self.ledger.remove(seq, p0, p1)
        self._step("remove", seq, p0, p1)
        return True

    def fork(self, src: int, dst: int, length: int) -> None:
        """Close ``dst``, and create it again as the first ``length`` tokens of ``src``."""
        self.sequences[dst].close()
        self.ledger.remove(dst)
        self._step("remove", dst, -1, -1)
        positions = self.sequences[src].positions
        end = positions[length] if length < len(positions) else -1
        try:
            self.sequences[dst] = self.sequences[src].fork(length)
        except PartialRemovalRefused:
            self.sequences[dst] = self.runtime.sequence(dst)
            raise
        if not self.ledger.streams:
            self.ledger.copy(src, dst, -1, end)
            self._step("copy", src, dst, -1, end)
            return
        # Between streams, whole sequences are copied, and the rest is removed.
        self.ledger.copy(src, dst)
        self._step("copy", src, dst, -1, -1)
        if end >= 0:
            self._step("update")
            self.ledger.remove(dst, end)
            self._step("remove", dst, end, -1)

    def keep(self, seq: int) -> None:
        """Remove all other sequences, which the runtime does one by one."""
        self.native.seq_keep(self.context, seq)
        for number, ledger in enumerate(self.runtime.ledgers):
            if number != seq:
                ledger.clear()
        self.runtime.defrag_policy.freed()
        self.ledger.keep(seq)
        self._step("keep", seq)

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions, also of cells that others share."""
        self.sequences[seq].shift(_bound(p0), _bound(p1), delta, allow_shared=True)
        self.ledger.shift(seq, p0, p1, delta)
        self._step("shift", seq, p0, p1, delta)

    def divide(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions, also of cells that others share."""
        self.sequences[seq].divide(_bound(p0), _bound(p1), divisor, allow_shared=True)
        self.ledger.divide(seq, p0, p1, divisor)
        self._step("divide", seq, p0, p1, divisor)

    def clear(self) -> None:
        """Empty the cache."""
        self.runtime.clear()
        self.ledger.clear()
        self._step("clear")

    def update(self) -> None:
        """Apply pending shifts."""
        self.runtime.kv.update()
        self._step("update")

    def save(self, seq: int, name: str) -> None:
        """Save the state of a sequence under a name."""
        if not self.params.guard:
            # While a shift is pending, positions are new and keys old; the guard handles it.
            self.update()
        self.saved[name] = (self.sequences[seq].save(), self.ledger.of(seq))
        self._step("save", seq, name)

    def restore(self, seq: int, name: str, *, must: bool = True) -> bool:
        """Restore a saved state; with ``must``, a refusal fails the claim."""
        state, cells = self.saved[name]
        try:
            self.sequences[seq].restore(state)
        except StateError as error:
            if must:
                msg = f"a state of {len(cells)} tokens was refused: {error}"
                raise ScenarioFailed(msg, failure="claim") from error
            return False
        self.ledger.replace(seq, cells)
        self._step("restore", seq, name)
        return True

    def check_cells(self, *, ends: bool = True) -> None:
        """Raise ScenarioFailed ("lost") unless cells, both ledgers and all counts agree.

        ``ends`` also compares the first and last position of each sequence.
        """
        super().check_cells()
        if self.info.n_swa:
            self.check_windows(self.info.n_swa)
        for sequence in self.sequences:
            expected = self.ledger.of(sequence.id)
            found = list(zip(sequence.positions, sequence.tokens, strict=True))
            if found != expected:
                msg = f"sequence {sequence.id} records {found}, expected {expected}"
                raise ScenarioFailed(msg, failure="lost")
            if ends:
                self._check_ends(sequence, expected)

    def _check_ends(self, sequence: Sequence, expected: list[tuple[int, int]]) -> None:
        first, last = (expected[0][0], expected[-1][0]) if expected else (-1, -1)
        found = sequence.pos_min, sequence.pos_max
        # States and windows do not store the start of a sequence.
        begins = found[0] == first or self.info.memory is not MemoryType.ATTENTION
        ends = found[1] == last or self.ambiguous(found[1], last)
        if not (begins and ends):
            msg = (
                f"sequence {sequence.id} has positions {found[0]}..{found[1]}, "
                f"expected {first}..{last}"
            )
            raise ScenarioFailed(msg, failure="lost")

    def _follow_emptied(self) -> None:
        """Remove the tokens of sequences that the runtime emptied for lack of a rollback."""
        emptied = [*self.runtime.emptied]
        states = self.info.memory.keeps_states
        if states and emptied and emptied == self.ledger.sequences:
            self.ledger.clear()
            self._step("clear")
            return
        for seq in emptied:
            if self.info.memory is MemoryType.ATTENTION:
                msg = f"a failed decode emptied sequence {seq}, whose cells could stay"
                raise ScenarioFailed(msg, failure="lost")
            self.ledger.remove(seq)
            self._step("remove", seq, -1, -1)

    def _run(self, feed: BatchRows) -> int:
        """Decode with the runtime's method for batches of this kind."""
        self.cause = ""
        flat = [seq for seqs in feed.owners for seq in seqs]
        counts = np.array([len(seqs) for seqs in feed.owners], dtype=np.int32)
        shared = len(flat) > len(counts)
        try:
            if len(flat) == 1:
                self.sequences[flat[0]].step(int(feed.token[0]))
            elif feed.logits.all() and not shared:
                self.runtime.step_all([self.sequences[seq] for seq in flat], feed.token)
            else:
                batch = Batch.of(
                    feed.token, feed.pos, flat, feed.logits, counts=counts if shared else None
                )
                self.runtime.decode(batch)
        except NoKVSlot as error:
            self.cause = error.cause
            self._follow_emptied()
            return DecodeStatus.NO_SLOT
        except Cancelled:
            self._follow_emptied()
            return DecodeStatus.ABORTED
        return DecodeStatus.OK


def _bound(position: int) -> int | None:
    return None if position < 0 else position
