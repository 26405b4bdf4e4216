"""Take note of what happens to a context, and look at its cells when they may have moved.

Notes are kept as they come; `notes` writes them down many at a time. The cells are looked at around
every call that can move or free some, and around a decode that may have to defragment before it
finds its cells, which the number of free ones tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import KvError
from pyllamakv.harness import looks

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextHandle
    from pyllamakv.harness.looks import Look
    from pyllamakv.harness.notes import Notes, Seen
    from pyllamakv.runtime.context import Context

#: Rows that are written at once, and the nanoseconds after which fewer are.
CHUNK, PATIENCE = 512, 2_000_000_000
#: Every so many tokens the likeliest next one is noted.
SAMPLE = 32

clock = time.perf_counter_ns


@dataclass
class Decoding:
    """Hold a decode while it runs: what it is, of how many tokens, and its code."""

    what: Any
    n: int
    code: int = 0


class Watch:
    """Note calls on one context. The context's turn is held in every call."""

    def __init__(self, context: Context, notes: Notes) -> None:
        native = context.native
        self.inner = native
        self.about = native.about
        self.notes = notes
        self.mine = context.handle
        self._info, self._n_vocab = context.info, context.n_vocab
        self.add = notes.rows.append
        self.polls = -1
        self.look: Look | None = None
        self.since = 0  # decodes since that look
        self.free = self.hole = 0
        self.calm = 0  # tokens until the next pause
        self.due = clock() + PATIENCE
        self.glance()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @contextmanager
    def decoding(self, kind: str, what: Any, n: int) -> Iterator[Decoding]:
        """Note a decode of ``n`` tokens that runs inside; it says what came of it."""
        if self.since and self._unsafe(n):
            self.glance()
        note, began = Decoding(what, n), clock()
        try:
            yield note
        except Exception as error:
            self.failed(kind, note.what, began, error)
            raise
        ended = clock()
        self.add((kind, note.what, began, ended, note.code, None, None))
        self.calm -= note.n
        self.since += 1
        safe = not self._unsafe(note.n)
        self.free -= note.n
        self.hole -= note.n
        if note.code or self.calm <= 0 or not safe or ended > self.due:
            self.pause(note.code, note.n)

    def _unsafe(self, n: int) -> bool:
        """Tell whether a batch may have to defragment before it finds its cells."""
        return n > (self.free if n == 1 else self.hole)

    def failed(self, kind: str, what: Any, began: int, error: Exception) -> None:
        """Note a call that raised."""
        self.add((kind, what, began, clock(), None, {"error": type(error).__name__}, None))
        self.since += 1
        with suppress(KvError):  # a worker that is gone shows no cells
            self.pause(-1, 0)

    def change(
        self, kind: str, what: Any, context: ContextHandle, call: Any, *words: Any,
        still: bool = False,
    ) -> Any:  # fmt: skip
        """Note a call that changes the cache; ``still``: no cell is moved or freed."""
        if context != self.mine:
            return call(context, *words)
        if self.since and not still:
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
        self.add((kind, what, began, ended, found, None, seen))
        if ended > self.due or self.notes.heavy:
            self._write()
        return found

    def pause(self, code: int, n: int) -> None:
        """Complete the row of a decode with what is not asked for every time."""
        kind, what, began, ended, status, more, seen = self.notes.rows.pop()
        more = dict(more or {})
        if code == 0 and self.calm <= 0:
            more["best"] = self._best()
            self.calm = SAMPLE
        elif code == 2 and self.polls < 0:
            more["polls"] = self.inner.cancel_polls(self.mine)
        if code or self.free < 0 or (n > 1 and self.hole < 0):
            before, alone = self.look, self.since == 1
            self.glance()
            seen = before, self.look, alone
        self.add((kind, what, began, ended, status, more, seen))
        if len(self.notes.rows) >= CHUNK or ended > self.due or self.notes.heavy:
            self._write()

    def _best(self) -> list[Any] | None:
        try:
            rows = self.inner.logits_all(self.mine, self._n_vocab)
        except KvError:
            return None  # a batch that asked for none
        return looks.best(rows[-1])

    def glance(self) -> None:
        """Look at the cells, and count what a decode has before it has to defragment."""
        self.look = looks.look(self.inner, self.mine, self._info)
        self.since = 0
        self.notes.count(self.look)
        self.free, self.hole = (1 << 62, 1 << 62) if self.look is None else self.look.room

    def _write(self) -> None:
        self.due = clock() + PATIENCE
        self.notes.flush()
