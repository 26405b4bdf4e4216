"""Check the content of a context: K and V by their bytes, logits with two references.

One reference decodes all tokens again (`reference.Reference`). The other has the state of one
sequence restored into it: the logits of the next token are bit-identical if attention adds the same
cells in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import PartialRemovalRefused, ScenarioFailed
from pyllamakv.runtime import ggml_types as types
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.reference import Reference, Tolerance, distance
from qa.random_operations.rope_shift_check import RopeShiftCheck

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.state_parser import SequenceState
    from pyllamakv.scenarios.batch_composition import BatchRows
    from qa.random_operations.context_player import ContextPlayer

#: Bound for logits with keys of 4 bits. There, cells are in another order, and a single key of a
#: short sequence that rounds to the next step made 0.17, the most in 300 such cases (keys of 8
#: bits: 0.02); all other keys were bit-identical.
COARSE = 0.5


def bound_of(subject: ContextPlayer | Context) -> float:
    """Return the bound for logits of the same tokens in other batches and other cells."""
    if types.number_type(subject.params.type_k).name.startswith("q4"):
        return COARSE
    return Tolerance().of(subject)


class ContentCheck:
    """Check the content of ``subject``; states are restored into ``other``, a similar context.

    ``watching`` False skips the comparison of bytes around operations. ``compared`` counts the
    sequences whose bytes were compared, ``logits`` the rows of logits after restored states, and
    ``exact`` those that had to be bit-identical, and were.
    """

    def __init__(self, subject: ContextPlayer, other: Context) -> None:
        self.subject = subject
        self.other = other
        self.reference = Reference(subject)
        self.turning = RopeShiftCheck(subject, other)
        self.bound = self.reference.bound
        self.reference.bound = bound_of(subject)
        self.watching = True
        self.compared = self.logits = self.exact = 0

    def close(self) -> None:
        """Release the reference's context."""
        self.reference.close()

    @property
    def pending(self) -> bool:
        """Return whether a shift is pending: positions are new, and keys old."""
        return self.turning.pending

    @contextmanager
    def unchanged(self, what: str, *but: int) -> Iterator[None]:
        """Raise ScenarioFailed if K or V of other sequences change; a pending shift changes K."""
        if not self.watching or self.pending:
            yield
            return
        before = self.rows(*(seq for seq in self.subject.ledger.sequences if seq not in but))
        yield
        self.compare(before, what)

    def compare(self, before: kv_rows.Rows, what: str) -> None:
        """Raise ScenarioFailed if tokens that remain from ``before`` have different bytes."""
        before = {seq: state for seq, state in before.items() if self._comparable(seq, state)}
        kv_rows.compare(before, self.rows(*before), what, window=self.subject.info.n_swa)
        self.compared += len(before)

    def rows(self, *sequences: int) -> kv_rows.Rows:
        """Read K and V of some sequences."""
        # Not by the subject's own library, because its recorder must not record the check.
        return kv_rows.read(self.other.native, self.subject.context, sequences)

    def _comparable(self, seq: int, state: SequenceState) -> bool:
        """Return whether a sequence still exists, and its one state got no further token."""
        following = self.subject.ledger.next(seq)
        if self.subject.info.memory is not MemoryType.RECURRENT:
            return following > 0
        return any(following == section.pos.max() + 1 for section in state.sections)

    def check_logits(self) -> None:
        """Compare the logits of all decodes, and of the next token of each sequence.

        Raises ScenarioFailed ("data"). Without a free cell, a sequence has no next token.
        """
        subject = self.subject
        if self.pending:
            subject.update()
        self.turning.settle()
        stays = subject.info.memory.keeps_states
        self.reference.catch_up()
        for seq in subject.ledger.sequences:
            if not subject.room(seq):
                continue
            start, order = subject.ledger.next(seq), self._order(seq)
            state = subject.sequences[seq].save()
            feed = subject.feed({seq: 1})
            subject.decode(feed)
            self.reference.catch_up()
            # Flash attention skips the cells of others.
            same = bool(order and subject.info.flash_attn) and self._order(seq) == [*order, start]
            plain = subject.info.memory is MemoryType.ATTENTION
            self._check_restored(seq, state, feed, exact=same and plain)
            if not stays:
                # A window may have dropped cells that the sequence would see again.
                with suppress(PartialRemovalRefused):
                    subject.remove(seq, start)

    def _check_restored(self, seq: int, state: bytes, feed: BatchRows, *, exact: bool) -> None:
        """Compare the logits of a token with those after a restored state."""
        self.other.clear()
        with self.other.sequence() as twin:
            twin.restore(state)
            twin.step(int(feed.token[0]))
            found = distance(self.subject.steps[-1].logits[0], self.other.logits().copy())
        bound = 0.0 if exact else self.bound
        if found > bound:
            pos = int(feed.pos[0])
            msg = (
                f"logits at position {pos} of sequence {seq} differ by {found:.3g} from those "
                f"after its restored state, allowed {bound:g}"
            )
            raise ScenarioFailed(msg, failure="data", evidence={"sequence": seq, "position": pos})
        self.logits += 1
        self.exact += exact

    def _order(self, seq: int) -> list[int]:
        """Return the positions of a sequence in the order of its cells; empty if unknown."""
        snapshot = self.subject.snapshot()
        streams = snapshot.streams if snapshot is not None else ()
        mine = [
            each
            for each in streams
            if not each.swa and each.info.stream == (seq if self.subject.ledger.streams else 0)
        ]
        cells = mine[0] if mine else None
        return [] if cells is None else cells.pos[cells.has(seq)].tolist()
