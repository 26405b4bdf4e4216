"""Take note of what happens to a context, and look at its cells when they may have moved.

Notes are kept as they come; `notes` writes them down many at a time. The cells are looked at around
every call that can move or free some, and around a decode that may have to defragment before it
finds its cells, which the number of free ones tells.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import KvError
from pyllamakv.scenarios import cell_samples
from pyllamakv.traces.notes import whole

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextHandle
    from pyllamakv.runtime.context import Context
    from pyllamakv.scenarios.cell_samples import Look
    from pyllamakv.traces.notes import Notes, Seen

#: Rows that are written at once, and the nanoseconds after which fewer are.
CHUNK, PATIENCE = 512, 2_000_000_000
#: After so many decodes the likeliest next token is noted; sooner after the cells were changed.
SAMPLE, SOON = 32, 4
#: Where cells cannot be seen, none is known to be missing.
ROOM = 1 << 62

clock = time.perf_counter_ns


class Watch:
    """Note calls on one context. The context's turn is held in every call."""

    def __init__(self, context: Context, notes: Notes) -> None:
        native = context.native
        self.inner = native
        self.about, self.environment = native.about, native.environment
        self.notes = notes
        self.mine = context.handle
        self._info, self._n_vocab = context.info, context.n_vocab
        self.add = notes.rows.append
        self.polls = -1
        self.look: Look | None = None
        self.free = 0  # as the look saw them
        self.spent = 0  # tokens since that look
        self.calm = 0  # decodes until the next pause
        self.due = clock() + PATIENCE
        self.glance()

    def prepare(self, n: int) -> None:
        """Look at the cells before a decode of ``n`` tokens that may have to move some."""
        if self.spent and not self._safe(n):
            self.glance()

    def done(self, kind: str, what: Any, began: int, code: int, n: int) -> None:
        """Note a decode of ``n`` tokens."""
        ended = clock()
        self.add((kind, what, began, ended, code, None, None))
        safe = self._safe(n)
        self.calm -= 1
        self.spent += n
        if code or self.calm <= 0 or not safe or ended > self.due:
            self.pause(code, n)

    def _safe(self, n: int) -> bool:
        """Tell whether a batch finds its cells without moving any."""
        return self.spent + n <= self._room(n)

    def _room(self, n: int) -> int:
        return self.look.hole if n > 1 and self.look is not None else self.free

    def failed(self, kind: str, what: Any, began: int, error: Exception) -> None:
        """Note a call that raised."""
        self.add((kind, what, began, clock(), None, {"error": type(error).__name__}, None))
        with suppress(KvError):  # a worker that is gone shows no cells
            self.pause(-1, 0)

    def change(
        self, kind: str, what: Any, context: ContextHandle, call: Any, *words: Any,
        still: bool = False,
    ) -> Any:  # fmt: skip
        """Note a call that changes the cache; ``still``: no cell is moved or freed."""
        if context != self.mine:
            return call(context, *words)
        if self.spent and not still:
            self.glance()
        began = clock()
        try:
            found = call(context, *words)
        except Exception as error:
            self.failed(kind, what, began, error)
            raise
        ended = clock()
        seen: Seen | None = None
        if not still:
            before = self.look
            self.glance()
            seen = before, self.look, True
            self.calm = min(self.calm, SOON)
        self.add((kind, what, began, ended, found, None, seen))
        self._write_some(ended)
        return found

    def pause(self, code: int, n: int) -> None:
        """Complete the row of a decode with what is not asked for every time."""
        kind, what, began, ended, status, more, seen = whole(self.notes.rows.pop())
        more = dict(more or {})
        if code == 0 and self.calm <= 0 and _asked(kind, what):
            more["best"] = self._best()
            self.calm = SAMPLE
        elif code == 2 and self.polls < 0:
            more["polls"] = self.inner.cancel_polls(self.mine)
        if code or self.spent > self._room(n):
            before, alone = self.look, self.spent == n
            self.glance()
            seen = before, self.look, alone
        self.add((kind, what, began, ended, status, more, seen))
        self._write_some(ended)

    def _best(self) -> list[Any]:
        return cell_samples.best(self.inner.logits_all(self.mine, self._n_vocab)[-1])

    def glance(self) -> None:
        """Look at the cells, and count what a decode has before it has to defragment."""
        self.look = cell_samples.look(self.inner, self.mine, self._info)
        self.spent = 0
        self.notes.count(self.look)
        self.free = ROOM if self.look is None else self.look.free

    def _write_some(self, now: int) -> None:
        if len(self.notes.rows) >= CHUNK or now > self.due or self.notes.heavy:
            self.due = clock() + PATIENCE
            self.notes.flush()


def _asked(kind: str, what: Any) -> bool:
    """Tell whether a batch asked for logits at all."""
    flags = what[4] if kind == "batch" else None
    return flags is None or bool(flags.any())
