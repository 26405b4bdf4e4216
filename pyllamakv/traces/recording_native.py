"""Record every call of a context that changes the cache."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from pyllamakv.binding.forwarding import forwards, operations
from pyllamakv.binding.protocol import Native
from pyllamakv.binding.signal_check import keep_run, take_run
from pyllamakv.errors import KvError, Unsupported
from pyllamakv.scenarios import cell_samples
from pyllamakv.traces.row_writer import long_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.binding.protocol import ContextHandle, SamplerHandle
    from pyllamakv.runtime.context import Context
    from pyllamakv.scenarios.cell_samples import CellSample
    from pyllamakv.traces.row_writer import RowWriter, Seen


#: Rows that are written at once, and the nanoseconds after which fewer are written.
CHUNK, FLUSH_NS = 512, 2_000_000_000
#: Decodes between two records of the most likely next token; fewer after a change of the cells.
BEST_EVERY, BEST_SOON = 32, 4
#: If cells cannot be read, all count as present.
UNLIMITED = 1 << 62

clock = time.perf_counter_ns


class CallRecorder:
    """Record calls on one context. The caller holds the context's lock in every call."""

    def __init__(self, context: Context, notes: RowWriter) -> None:
        native = context.native
        self.inner = native
        self.about, self.environment = native.about, native.environment
        self.notes = notes
        self.handle = context.handle
        self._info, self._n_vocab = context.info, context.n_vocab
        self.add = notes.rows.append
        self.polls = -1
        self.last_sample: CellSample | None = None
        self.free = 0  # at the last sample
        self.decoded_since = 0  # tokens since the last sample
        self.until_pause = 0  # decodes until the next pause
        self.flush_at = clock() + FLUSH_NS
        self.sample_cells()

    def prepare(self, n: int) -> None:
        """Sample the cells before a decode of ``n`` tokens that may have to move some."""
        if self.decoded_since and not self._safe(n):
            self.sample_cells()

    def done(self, kind: str, what: Any, began: int, code: int, n: int) -> None:
        """Record a decode of ``n`` tokens."""
        ended = clock()
        self.add((kind, what, began, ended, code, None, None))
        safe = self._safe(n)
        self.until_pause -= 1
        self.decoded_since += n
        if code or self.until_pause <= 0 or not safe or ended > self.flush_at:
            self.pause(code, n)

    def _safe(self, n: int) -> bool:
        """Return whether a batch has enough cells without moving any."""
        return self.decoded_since + n <= self._room(n)

    def _room(self, n: int) -> int:
        return self.last_sample.hole if n > 1 and self.last_sample is not None else self.free

    def failed(self, kind: str, what: Any, began: int, error: Exception) -> None:
        """Record a call that raised."""
        self.add((kind, what, began, clock(), None, {"error": type(error).__name__}, None))
        with suppress(KvError):  # a dead worker shows no cells
            self.pause(-1, 0)

    def change(
        self, kind: str, what: Any, context: ContextHandle, call: Any, *words: Any,
        still: bool = False,
    ) -> Any:  # fmt: skip
        """Record a call that changes the cache; ``still``: no cell is moved or freed."""
        if context != self.handle:
            return call(context, *words)
        if self.decoded_since and not still:
            self.sample_cells()
        began = clock()
        try:
            found = call(context, *words)
        except Exception as error:
            self.failed(kind, what, began, error)
            raise
        ended = clock()
        seen: Seen | None = None
        if not still:
            before = self.last_sample
            self.sample_cells()
            seen = before, self.last_sample, True
            self.until_pause = min(self.until_pause, BEST_SOON)
        self.add((kind, what, began, ended, found, None, seen))
        self._write_some(ended)
        return found

    def pause(self, code: int, n: int) -> None:
        """Complete the row of a decode with values that are not read for each decode."""
        kind, what, began, ended, status, more, seen = long_form(self.notes.rows.pop())
        more = dict(more or {})
        if code == 0 and self.until_pause <= 0 and _asked(kind, what):
            more["best"] = self._best()
            self.until_pause = BEST_EVERY
        elif code == 2 and self.polls < 0:
            more["polls"] = self.inner.cancel_polls(self.handle)
        if code or self.decoded_since > self._room(n):
            before, alone = self.last_sample, self.decoded_since == n
            self.sample_cells()
            seen = before, self.last_sample, alone
        self.add((kind, what, began, ended, status, more, seen))
        self._write_some(ended)

    def _best(self) -> list[Any]:
        return cell_samples.top_token(self.inner.logits_all(self.handle, self._n_vocab)[-1])

    def sample_cells(self) -> None:
        """Sample the cells, and compute how many tokens fit before a decode may move cells."""
        self.last_sample = cell_samples.sample_cells(self.inner, self.handle, self._info)
        self.decoded_since = 0
        self.notes.count(self.last_sample)
        self.free = UNLIMITED if self.last_sample is None else self.last_sample.free

    def _write_some(self, now: int) -> None:
        if len(self.notes.rows) >= CHUNK or now > self.flush_at or self.notes.heavy:
            self.flush_at = clock() + FLUSH_NS
            self.notes.flush()


def _asked(kind: str, what: Any) -> bool:
    """Return whether a batch requests any logits."""
    flags = what[4] if kind == "batch" else None
    return flags is None or bool(flags.any())


class _Change(NamedTuple):
    """How an operation is recorded: the kind of row, with or without arguments.

    ``still``: it moves and frees no cell.
    """

    kind: str
    words: bool = True
    still: bool = False


#: Operations that change the cache and are recorded directly; their methods are generated.
_CHANGES: Final = {
    "clear": _Change("clear", words=False),
    "seq_rm": _Change("remove"),
    "seq_cp": _Change("copy"),
    "seq_keep": _Change("keep"),
    "seq_add": _Change("shift"),
    "seq_div": _Change("divide"),
    "defrag": _Change("defrag"),
    "update": _Change("update"),
    "threads": _Change("threads", still=True),
}
#: Operations with a method of their own. All others are forwarded unchanged.
_BY_HAND: Final = (
    "adapters_set",
    "cancel_after",
    "decode",
    "run",
    "state_load",
    "state_save",
)


@forwards(Native, via="_noted", by_hand=_BY_HAND, only=_CHANGES)
class RecordingNative(CallRecorder):
    """Forward every call to a library, and record those on one context.

    A decode of one token costs two clock reads and one append; the rest is done every few rows, in
    `pause`. The caller holds the context's lock in every call.
    """

    def __init__(self, context: Context, notes: RowWriter) -> None:
        super().__init__(context, notes)
        native = self.inner
        self._decode = native.decode
        # Bound once: attribute access is slow on a class with `__getattr__`. The wrapped object may
        # be such a class, which does not list the attributes that it forwards.
        own = {*vars(self), *dir(type(self))}
        for name in {*dir(native), *operations(Native)} - own:
            if not name.startswith("_"):
                with suppress(AttributeError):
                    setattr(self, name, getattr(native, name))
        self._known: dict[bytes, str] = {}
        self._states = 0

    # decodes...

    def decode(
        self, context: ContextHandle, token: Any, pos: Any, seq_count: Any, seq_id: Any, logits: Any
    ) -> int:
        """Decode a batch."""
        if context != self.handle:
            return self._decode(context, token, pos, seq_count, seq_id, logits)
        if type(token) is list and len(token) == 1 and logits is None:
            return self._step(context, token, pos, seq_id)
        if np.ndim(token) == 2:
            raise Unsupported("a trace cannot record embeddings as input; end the recording first")
        # Copies: the caller may change its arrays and lists before they are written.
        arrays = (token, pos, seq_count, seq_id, logits)
        what = tuple(None if each is None else np.array(each) for each in arrays)
        self.prepare(len(token))
        began = clock()
        try:
            code = self._decode(context, token, pos, seq_count, seq_id, logits)
        except Exception as error:
            self.failed("batch", what, began, error)
            raise
        self.done("batch", what, began, code, len(token))
        return code

    def _step(self, context: ContextHandle, token: Any, pos: Any, seq_id: Any) -> int:
        """Decode one token with logits."""
        if self.decoded_since >= self.free:
            self.prepare(1)
        began = clock()
        try:
            code = self._decode(context, token, pos, None, seq_id, None)
        except Exception as error:
            self.failed("step", (token[0], pos[0], seq_id[0]), began, error)
            raise
        ended = clock()
        self.add((began, ended, token[0], pos[0], seq_id[0], code))
        self.until_pause -= 1
        self.decoded_since += 1
        if code or self.until_pause <= 0 or self.decoded_since > self.free or ended > self.flush_at:
            self.pause(code, 1)
        return code

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Any,
        pos: Any,
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode and sample repeatedly."""
        if context != self.handle:
            return self.inner.run(sampler, context, token, pos, seq_id, steps, stop)
        what, n = (tuple(token), tuple(pos), seq_id), len(seq_id)
        self.prepare(steps * n)
        began = clock()
        try:
            code, rows = self.inner.run(sampler, context, token, pos, seq_id, steps, stop)
        except Exception as error:
            self.failed("advance", (*what, []), began, error)
            raise
        except BaseException as error:  # of a signal handler
            completed = take_run(error)
            if completed is not None:
                keep_run(error, *completed)
                self.done(
                    "advance", (*what, completed[1]), began, completed[0], len(completed[1]) * n
                )
            raise
        # If no token could be sampled after the last step, that step was decoded nevertheless.
        unsampled = bool(rows) and min(rows[-1]) < 0
        self.done("advance", (*what, rows), began, 0 if unsampled else code, len(rows) * n)
        return code, rows

    # what changes the cache...

    def _noted(self, operation: str, context: ContextHandle, *words: Any) -> Any:
        """Record an operation of `_CHANGES`, and forward it."""
        change = _CHANGES[operation]
        what = words if change.words else ()
        call = getattr(self.inner, operation)
        return self.change(change.kind, what, context, call, *words, still=change.still)

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes."""
        self.change("cancel", (polls,), context, self.inner.cancel_after, polls, still=True)
        if context == self.handle:
            self.polls = polls

    def adapters_set(
        self, context: ContextHandle, adapters: Sequence[int], scales: Sequence[float]
    ) -> None:
        """Refuse adapters in the recorded context: a replay has no files of them."""
        if context == self.handle:
            raise Unsupported("a trace cannot record LoRA adapters; end the recording first")
        self.inner.adapters_set(context, adapters, scales)

    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return the state of a sequence."""
        if context != self.handle:
            return self.inner.state_save(context, seq)
        name = self._name()
        state: bytes = self.change(
            "save", (seq, name), context, self.inner.state_save, seq, still=True
        )
        self._known[_digest(state)] = name
        return state

    def state_load(self, context: ContextHandle, seq: int, state: bytes | memoryview) -> int:
        """Restore a sequence."""
        if context != self.handle:
            return self.inner.state_load(context, seq, state)
        key = _digest(state)
        name, foreign = self._known.get(key), None
        if name is None:
            # The state was saved before the recording, or in another context: the trace contains
            # all of it.
            name, foreign = self._name(), bytes(state)
            self._known[key] = name
        what = (seq, name, foreign)
        done: int = self.change("restore", what, context, self.inner.state_load, seq, state)
        return done

    def _name(self) -> str:
        self._states += 1
        return f"state {self._states}"


def _digest(state: bytes | memoryview) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()
