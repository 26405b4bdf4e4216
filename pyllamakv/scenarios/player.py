"""Run operations on one context, and track its expected content in a ledger.

A player calls `binding.protocol.Native` directly, without other code of this package in between.
Scenarios, scripts and replays use players.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding.protocol import (
    Capability,
    ContextHandle,
    ContextParams,
    Counters,
    DecodeStatus,
    MemoryType,
    ModelHandle,
    Native,
    RawDefrag,
)
from pyllamakv.errors import NativeError, ScenarioFailed, Unsupported, WorkerDied
from pyllamakv.runtime.snapshot import CellMap, Snapshot
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.batch_composition import BatchRows, Feeds, compose, image_rows
from pyllamakv.scenarios.cell_ledger import CellLedger, Content, cell_differences, window_errors

if TYPE_CHECKING:
    from collections import Counter

    from numpy.typing import NDArray

#: Words for the statuses of a decode, as scripts and messages use them.
WORDS = {DecodeStatus.OK: "ok", DecodeStatus.NO_SLOT: "no-slot", DecodeStatus.ABORTED: "aborted"}


@dataclass(frozen=True)
class Step:
    """One operation that changed the cache, so that a reference can repeat it."""

    op: str
    arguments: tuple[Any, ...]
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict, compare=False)


class Player:
    """Drive ``context``, or a new one; ``n_vocab`` bounds the tokens that it makes up."""

    def __init__(
        self,
        native: Native,
        model: ModelHandle,
        params: ContextParams,
        context: ContextHandle | None = None,
    ) -> None:
        self.native = native
        self.model = model
        self.params = params
        self.n_vocab = native.model_info(model).n_vocab
        self.context = native.context_new(model, params) if context is None else context
        self.info = native.context_info(self.context)
        self.ledger = CellLedger(streams=self.info.n_streams > 1)
        self.steps: list[Step] = []
        self.saved: dict[str, tuple[bytes, list[tuple[int, int]]]] = {}
        self._closed = False

    def close(self) -> None:
        """Release the context."""
        if not self._closed:
            self._closed = True
            self.native.context_free(self.context)

    # --- decoding ---------------------------------------------------------------------------

    def feed(self, feeds: Feeds, *, interleave: bool = False) -> BatchRows:
        """Return a batch that continues each sequence; the last token of each asks for logits."""
        return compose(self.ledger, feeds, self.n_vocab, interleave=interleave)

    def decode(
        self,
        feeds: Feeds | BatchRows,
        *,
        interleave: bool = False,
        expect: DecodeStatus | None = DecodeStatus.OK,
    ) -> int:
        """Decode one batch and return llama.cpp's status; the ledger follows what succeeded.

        Raises ScenarioFailed ("claim") when the status is not the expected one; None expects any.
        """
        feed = feeds if isinstance(feeds, BatchRows) else self.feed(feeds, interleave=interleave)
        status = self._run(feed)
        if status == DecodeStatus.OK:
            logits = feed.read(self.native, self.context, self.n_vocab)
            self.ledger.add(feed.token.tolist(), feed.pos.tolist(), feed.owners)
            self.steps.append(Step("decode", (feed,), logits))
        if expect is not None and status != expect:
            msg = (
                f"a decode of {len(feed.token)} tokens with {self.free} free cells ended with "
                f"{word(status)}, expected {word(expect)}"
            )
            evidence = {"status": status, "free": self.free}
            raise ScenarioFailed(msg, failure="claim", evidence=evidence)
        return status

    def decode_image(
        self,
        seq: int,
        rows: Sequence[int],
        columns: int,
        *,
        pos: int = -1,
        expect: DecodeStatus | None = DecodeStatus.OK,
    ) -> int:
        """Decode some rows of an image, whose embeddings share the next position, or ``pos``.

        Return llama.cpp's status, as `decode` does.
        """
        at = self.ledger.next(seq) if pos < 0 else pos
        width = self.native.model_info(self.model).n_embd
        return self.decode(image_rows(seq, at, rows, columns, width), expect=expect)

    def fill(self, counts: Mapping[Any, int], *, interleave: bool = False) -> None:
        """Decode generated tokens for each sequence, in batches of at most ``n_batch``."""
        left = dict(counts)
        while any(left.values()):
            share = max(1, self.info.n_batch // sum(1 for count in left.values() if count))
            part = {key: min(share, count) for key, count in left.items() if count}
            self.decode(part, interleave=interleave)
            for key, count in part.items():
                left[key] -= count

    # --- sequences --------------------------------------------------------------------------

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions of a sequence; False when the memory refuses a part."""
        done = self.native.seq_rm(self.context, seq, p0, p1)
        if done:
            self.ledger.remove(seq, p0, p1)
            self._step("remove", seq, p0, p1)
        return done

    def copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share the cells of ``src`` with ``dst``."""
        self.native.seq_cp(self.context, src, dst, p0, p1)
        self.ledger.copy(src, dst, p0, p1)
        self._step("copy", src, dst, p0, p1)

    def keep(self, seq: int) -> None:
        """Remove every other sequence."""
        self.native.seq_keep(self.context, seq)
        self.ledger.keep(seq)
        self._step("keep", seq)

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions; the keys follow with the next update or decode."""
        self.native.seq_add(self.context, seq, p0, p1, delta)
        self.ledger.shift(seq, p0, p1, delta)
        self._step("shift", seq, p0, p1, delta)

    def divide(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions; the keys follow with the next update or decode."""
        self.native.seq_div(self.context, seq, p0, p1, divisor)
        self.ledger.divide(seq, p0, p1, divisor)
        self._step("divide", seq, p0, p1, divisor)

    def clear(self) -> None:
        """Empty the cache."""
        self.native.clear(self.context, True)
        self.ledger.clear()
        self._step("clear")

    def save(self, seq: int, name: str) -> None:
        """Save the state of a sequence under a name."""
        state = self.native.state_save(self.context, seq)
        self.saved[name] = (state, self.ledger.of(seq))
        self._step("save", seq, name)

    def restore(self, seq: int, name: str, *, must: bool = True) -> bool:
        """Restore a saved state; with ``must``, a refusal fails the claim."""
        state, cells = self.saved[name]
        try:
            done = self.native.state_load(self.context, seq, state) > 0
        except WorkerDied:
            raise
        except NativeError:
            done = False
        if done:
            self.ledger.replace(seq, cells)
            self._step("restore", seq, name)
        elif must:
            others = sum(cell.seqs != {seq} for cell in self.ledger.cells)
            free = self.n_cells - others
            msg = f"a state of {len(cells)} tokens was refused with {free} free cells"
            raise ScenarioFailed(msg, failure="claim", evidence={"done": False})
        return done

    # --- the cache --------------------------------------------------------------------------

    def defrag(self) -> RawDefrag:
        """Defragment now. Raises Unsupported if the build cannot."""
        return self.native.defrag(self.context)

    def update(self) -> None:
        """Apply pending changes."""
        self.native.update(self.context)
        self._step("update")

    def cancel_after(self, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""
        self.native.cancel_after(self.context, polls)

    @cached_property
    def n_cells(self) -> int:
        """Return the size of the cache in cells."""
        snapshot = self.snapshot()
        return self.info.n_ctx if snapshot is None else int(snapshot.stats.size)

    @property
    def free(self) -> int:
        """Return the number of free cells according to the ledger."""
        return self.n_cells - self.ledger.used

    def snapshot(self) -> Snapshot | None:
        """Return the present cells, or None if the build cannot read them."""
        if not self.native.about.capabilities & Capability.CELLS or not self.info.n_caches:
            return None
        raw = [self.native.cells(self.context, cache) for cache in range(self.info.n_caches)]
        return Snapshot(
            tuple(CellMap(each.pos, each.shift, each.seqs, each.info) for each in raw),
            self.info.contiguous_slots,
        )

    def counters(self) -> Counters | None:
        """Return the counters of the context, or None if the build has none."""
        if not self.native.about.capabilities & Capability.COUNTERS:
            return None
        try:
            return self.native.counters(self.context)
        except Unsupported:
            return None

    def rows(self) -> kv_rows.Rows:
        """Return K and V of every sequence, position and layer, as stored."""
        return kv_rows.read(self.native, self.context, self.ledger.sequences)

    # --- proofs -----------------------------------------------------------------------------

    def resume(self, other: Player) -> None:
        """Continue with the ledger and steps of a player whose cells this one has taken over."""
        self.ledger, self.steps = other.ledger, list(other.steps)

    def check_cells(self) -> None:
        """Raise ScenarioFailed ("lost") unless cells and ledger agree."""
        snapshot = self.snapshot()
        if snapshot is None:
            self._check_positions()
            return
        found: Counter[Content] = kv_rows.contents(snapshot)
        lost, ghosts, text = cell_differences(self.ledger.contents(), found)
        if lost or ghosts:
            evidence = {"lost": lost, "ghosts": ghosts, "used": found.total()}
            raise ScenarioFailed(text, failure="lost", evidence=evidence)
        for cells in snapshot.streams:
            counted, used = cells.info.used, cells.stats.used
            if counted >= 0 and counted != used:
                msg = f"the library counts {counted} used cells, {used} are in use"
                raise ScenarioFailed(msg, failure="lost", evidence={"used": counted})

    def check_windows(self, window: int) -> None:
        """Raise ScenarioFailed ("lost") unless a sliding-window cache has what the next tokens see.

        Releases without such a cache keep everything in the one they have.
        """
        snapshot = self.snapshot()
        found = None if snapshot is None else kv_rows.sliding(snapshot)
        text = "" if found is None else window_errors(self.ledger, found, window)
        if text:
            raise ScenarioFailed(text, failure="lost")

    @contextmanager
    def unchanged(self, what: str = "a defragmentation", *, window: int = 0) -> Iterator[None]:
        """Raise ScenarioFailed unless K and V survive the operations inside.

        Missing rows are "lost", rows with other bytes are "data". Use it only without a pending
        shift, because applying one rewrites K. A sliding-window cache needs only the positions in
        the ``window`` of the next tokens.
        """
        before = self.rows()
        yield
        kv_rows.compare(before, self.rows(), what, window=window)

    def _run(self, feed: BatchRows) -> int:
        return feed.run(self.native, self.context)

    def _check_positions(self) -> None:
        for seq in self.ledger.sequences:
            expected = [pos for pos, _ in self.ledger.of(seq)]
            found = self.native.seq_pos_max(self.context, seq)
            if found != expected[-1] and not self.ambiguous(found, expected[-1]):
                msg = f"sequence {seq} ends at position {found}, expected {expected[-1]}"
                raise ScenarioFailed(msg, failure="lost")

    def ambiguous(self, found: int, expected: int) -> bool:
        """Return whether a reported -1 can mean 0, as in recurrent states of some releases."""
        return found == -1 and expected == 0 and self.info.memory is MemoryType.RECURRENT

    def _step(self, op: str, *arguments: Any) -> None:
        self.steps.append(Step(op, arguments))


def word(status: int) -> str:
    """Return the name of a decode's status."""
    try:
        return WORDS[DecodeStatus(status)]
    except ValueError:
        return f"status {status}"
