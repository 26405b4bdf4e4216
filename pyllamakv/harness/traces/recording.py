"""Record any run of a context as a trace, a row per operation (docs/traces.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError
from pyllamakv.harness.traces import starting, trace
from pyllamakv.harness.traces.notes import Notes
from pyllamakv.harness.traces.tap import Tap
from pyllamakv.runtime.context import Context, intercept

if TYPE_CHECKING:
    import os

    from pyllamakv.errors import KvError


class Recording:
    """Tell how a recording goes: ``path``, ``rows`` so far, and ``error`` once it broke off."""

    def __init__(self, path: Path, notes: Notes) -> None:
        self.path = path
        self._notes = notes

    @property
    def rows(self) -> int:
        """Count the rows that were written or wait to be."""
        return self._notes.written + len(self._notes.rows)

    @property
    def error(self) -> KvError | None:
        """Return why nothing is written any more; None while all is well."""
        return self._notes.error

    def flush(self) -> None:
        """Write the rows that wait; no other thread may use the context meanwhile."""
        self._notes.flush()

    def note(self, text: str) -> None:
        """Put a remark between the rows."""
        arguments.text("text", text)
        now = time.perf_counter_ns()
        self._notes.rows.append(("note", (text,), now, now, None, None, None))


def _recorded(native: Any) -> bool:
    """Tell whether a recording stands between a context and its library, also behind a watch."""
    while native is not None and not isinstance(native, Tap):
        native = getattr(native, "inner", None)
    return native is not None


@contextmanager
def record(
    context: Context,
    path: str | os.PathLike[str],
    *,
    pictures: bool = True,
    claim: str = "",
) -> Iterator[Recording]:
    """Record everything that is done to a context, from here to the end of the block.

    ``pictures`` False leaves the cells out and keeps their counts; ``claim`` says in words what
    the trace proves as a scenario. When the trace cannot be written any further, the run goes on
    without it, and DiskFull or ScriptError is raised at the end of the block. Raises UsageError,
    DiskFull or Unsupported before anything is recorded.
    """
    arguments.instance("context", context, Context, "a Context")
    path, claim = arguments.path("path", path), arguments.text("claim", claim)
    pictures = arguments.flag("pictures", pictures)
    with ExitStack() as stack:
        with context.turn:
            if _recorded(context.native):
                msg = "this context is being recorded already; end that recording first"
                raise UsageError(msg)
            head = trace.here(
                context.native.about.variant, context.model.path, context.native.environment
            )
            first = starting.rows(context, head.model)
            start = "rebuilt" if len(first) > 1 else "empty"
            head = replace(head, claim=claim, start=start)
            notes = Notes(Path(path), head, first, pictures=pictures)
            stack.callback(notes.close)
            stack.enter_context(intercept(context, lambda: Tap(context, notes)))
        yield Recording(Path(path), notes)
    if notes.error is not None:
        raise notes.error
