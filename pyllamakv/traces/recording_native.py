"""Stand between a context and its library, and note every call that changes the cache."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyllamakv.binding.forwarding import forwards, operations
from pyllamakv.binding.protocol import Native
from pyllamakv.traces.watch import Watch, clock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle, SamplerHandle
    from pyllamakv.runtime.context import Context
    from pyllamakv.traces.notes import Notes


class _Change(NamedTuple):
    """Say how an operation is noted: its kind of row, with its arguments or without.

    ``still``: it moves and frees no cell.
    """

    kind: str
    words: bool = True
    still: bool = False


#: Operations that change the cache and are noted as they come; their methods are generated.
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
#: Operations that are noted by a method of their own. Every other one is passed on as it is.
_BY_HAND: Final = (
    "cancel_after",
    "decode",
    "decode_each",
    "decode_one",
    "run",
    "state_load",
    "state_save",
)


@forwards(Native, via="_noted", by_hand=_BY_HAND, only=_CHANGES)
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
        for name in {*dir(native), *operations(Native)} - own:
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

    def _noted(self, operation: str, context: ContextHandle, *words: Any) -> Any:
        """Note an operation of `_CHANGES`, and pass it on."""
        change = _CHANGES[operation]
        what = words if change.words else ()
        call = getattr(self.inner, operation)
        return self.change(change.kind, what, context, call, *words, still=change.still)

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
