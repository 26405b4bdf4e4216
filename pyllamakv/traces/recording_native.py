"""Stand between a context and its library, and note every call that changes the cache."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import Native
from pyllamakv.traces.watch import Watch, clock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle, RawDefrag, SamplerHandle
    from pyllamakv.runtime.context import Context
    from pyllamakv.traces.notes import Notes


class Tap(Watch):
    """Pass every call on to a library, and note those on one context.

    Costs a decode of one token two looks at a clock and an append; what costs more is done every
    few rows, in `pause`. The context's turn is held in every call.
    """

    def __init__(self, context: Context, notes: Notes) -> None:
        super().__init__(context, notes)
        native = self.inner
        self._one = native.decode_one
        # Bound once: where a class has a `__getattr__`, Python finds every attribute slowly. What
        # is being watched has one, and does not list what it passes on.
        own = {*vars(self), *dir(type(self))}
        for name in {*dir(native), *dir(Native)} - own:
            if not name.startswith("_"):
                with suppress(AttributeError):
                    setattr(self, name, getattr(native, name))
        self._known: dict[bytes, str] = {}
        self._states = 0

    # decodes...

    def decode_one(self, context: ContextHandle, token: int, pos: int, seq_id: int) -> int:
        """Decode one token."""
        if context != self.mine:
            return self._one(context, token, pos, seq_id)
        if self.spent >= self.free:
            self.prepare(1)
        began = clock()
        try:
            code = self._one(context, token, pos, seq_id)
        except Exception as error:
            self.failed("step", (token, pos, seq_id), began, error)
            raise
        ended = clock()
        self.add((began, ended, token, pos, seq_id, code))
        self.calm -= 1
        self.spent += 1
        if code or self.calm <= 0 or self.spent > self.free or ended > self.due:
            self.pause(code, 1)
        return code

    def decode_each(
        self, context: ContextHandle, token: Any, pos: Any, seq_id: tuple[int, ...]
    ) -> int:
        """Decode a token of each of several sequences."""
        if context != self.mine:
            return self.inner.decode_each(context, token, pos, seq_id)
        what, n = (tuple(token), tuple(pos), seq_id), len(seq_id)
        self.prepare(n)
        began = clock()
        try:
            code = self.inner.decode_each(context, token, pos, seq_id)
        except Exception as error:
            self.failed("each", what, began, error)
            raise
        self.done("each", what, began, code, n)
        return code

    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32],
        pos: NDArray[np.int32],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32],
        logits: NDArray[np.int8] | None,
    ) -> int:
        """Decode a batch."""
        if context != self.mine:
            return self.inner.decode(context, token, pos, seq_count, seq_id, logits)
        # Copies: who decodes may change arrays in place before they are written down.
        arrays = (token, pos, seq_count, seq_id, logits)
        what = tuple(None if each is None else each.copy() for each in arrays)
        self.prepare(len(token))
        began = clock()
        try:
            code = self.inner.decode(context, token, pos, seq_count, seq_id, logits)
        except Exception as error:
            self.failed("batch", what, began, error)
            raise
        self.done("batch", what, began, code, len(token))
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
        """Decode and choose many times."""
        if context != self.mine:
            return self.inner.run(sampler, context, token, pos, seq_id, steps, stop)
        what, n = (tuple(token), tuple(pos), seq_id), len(seq_id)
        self.prepare(steps * n)
        began = clock()
        try:
            code, rows = self.inner.run(sampler, context, token, pos, seq_id, steps, stop)
        except Exception as error:
            self.failed("advance", (*what, []), began, error)
            raise
        self.done("advance", (*what, rows), began, code, len(rows) * n)
        return code, rows

    # what changes the cache...

    def clear(self, context: ContextHandle, data: bool) -> None:
        """Remove every sequence."""
        self.change("clear", (), context, self.inner.clear, data)

    def seq_rm(self, context: ContextHandle, seq: int, p0: int, p1: int) -> bool:
        """Remove positions."""
        done: bool = self.change("remove", (seq, p0, p1), context, self.inner.seq_rm, seq, p0, p1)
        return done

    def seq_cp(self, context: ContextHandle, src: int, dst: int, p0: int, p1: int) -> None:
        """Share cells."""
        what = (src, dst, p0, p1)
        self.change("copy", what, context, self.inner.seq_cp, *what)

    def seq_keep(self, context: ContextHandle, seq: int) -> None:
        """Remove every other sequence."""
        self.change("keep", (seq,), context, self.inner.seq_keep, seq)

    def seq_add(self, context: ContextHandle, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions."""
        what = (seq, p0, p1, delta)
        self.change("shift", what, context, self.inner.seq_add, *what)

    def seq_div(self, context: ContextHandle, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions."""
        what = (seq, p0, p1, divisor)
        self.change("divide", what, context, self.inner.seq_div, *what)

    def defrag(self, context: ContextHandle) -> RawDefrag:
        """Defragment."""
        found: RawDefrag = self.change("defrag", (), context, self.inner.defrag)
        return found

    def update(self, context: ContextHandle) -> None:
        """Apply what is pending."""
        self.change("update", (), context, self.inner.update)

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set how many threads compute."""
        what = (n_threads, n_threads_batch)
        self.change("threads", what, context, self.inner.threads, *what, still=True)

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes."""
        self.change("cancel", (polls,), context, self.inner.cancel_after, polls, still=True)
        if context == self.mine:
            self.polls = polls

    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return the state of a sequence."""
        if context != self.mine:
            return self.inner.state_save(context, seq)
        name = self._name()
        state: bytes = self.change(
            "save", (seq, name), context, self.inner.state_save, seq, still=True
        )
        self._known[_digest(state)] = name
        return state

    def state_load(self, context: ContextHandle, seq: int, state: bytes) -> int:
        """Restore a sequence."""
        if context != self.mine:
            return self.inner.state_load(context, seq, state)
        key = _digest(state)
        name, foreign = self._known.get(key), None
        if name is None:
            # From before the recording, or from another context: it goes into the trace whole.
            name, foreign = self._name(), state
            self._known[key] = name
        what = (seq, name, foreign)
        done: int = self.change("restore", what, context, self.inner.state_load, seq, state)
        return done

    def _name(self) -> str:
        self._states += 1
        return f"state {self._states}"


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()
