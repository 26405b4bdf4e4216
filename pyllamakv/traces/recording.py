"""Record the operations on a context as a trace, one row each (docs/traces.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.closing import NotCopied
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime import ggml_types as types
from pyllamakv.runtime.context import Context, intercept
from pyllamakv.scenarios import cell_samples
from pyllamakv.traces import batch_encoding, trace
from pyllamakv.traces.recording_native import RecordingNative
from pyllamakv.traces.row_writer import RowWriter

if TYPE_CHECKING:
    import os

    from pyllamakv.binding.protocol import ContextParams
    from pyllamakv.errors import KvError
    from pyllamakv.runtime.context import Context


#: The usual parameters of a context, which a trace omits.
_USUAL = {
    "swa_full": False, "offload_kqv": True, "embeddings": False, "defrag_thold": -1.0,
    "defrag_plan": 0, "defrag_mover": 0, "defrag_threads": 0, "pooling": -1,
}  # fmt: skip

#: The backing of a cache does not affect results, and a replay must not open another user's file.
_PLACE = {"kv_backing", "kv_path", "kv_keep", "kv_huge", "kv_model"}


def words(params: ContextParams, model: str) -> dict[str, Any]:
    """Return the line that creates a context with equal parameters."""
    asked = {k: v for k, v in asdict(params).items() if k not in _PLACE}
    found = {k: v for k, v in asked.items() if k not in _USUAL or v != _USUAL[k]}
    for name in ("type_k", "type_v"):
        found[name] = types.number_type(found[name]).name
    return {"op": "context", "model": model, **found}


def rows(context: Context, model: str) -> list[dict[str, Any]]:
    """Return the first rows of a trace: the context, and operations that recreate its content.

    Raises UsageError if the cache has tokens without a ledger.
    """
    result: dict[str, Any] = {"n_ctx": context.info.n_ctx, "at": 0}
    found = [{**words(context.params, model), "result": result}]
    cells: dict[tuple[int, ...], tuple[int, int, list[int]]] = {}
    for number, ledger in enumerate(context.ledgers):
        for token, pos, mark in zip(ledger.tokens, ledger.positions, ledger.marks, strict=True):
            # Streams share no cells, whatever the marks contain.
            key = (mark, number, pos) if context.stream_per_sequence else (mark,)
            cells.setdefault(key, (token, pos, []))[2].append(number)
    sample = cell_samples.sample_cells(context.native, context.handle, context.info)
    if (
        sample is not None
        and not context.stream_per_sequence
        and sample.counts["used"] != len(cells)
    ):
        msg = (
            f"the context has {sample.counts['used']} used cells, of which its sequences know "
            f"{len(cells)}: "
            f"clear it, or start recording earlier"
        )
        raise UsageError(msg)
    if sample is not None and not cells:
        result |= trace.seen("context", None, sample, label="context")
    # Marks grow with every decoded token.
    order = [cells[mark] for mark in sorted(cells)]
    size = context.info.n_batch
    for start in range(0, len(order), size):
        part = order[start : start + size]
        tokens, places = [each[0] for each in part], [each[1] for each in part]
        seq = [each[2] if len(each[2]) > 1 else each[2][0] for each in part]
        used = {} if sample is None else {"used": start + len(part)}
        batch = batch_encoding.encode(tokens, places, seq)
        found.append({"op": "batch", **batch, "result": {"status": 0, **used, "at": 0}})
    return found


class Recording(NotCopied):
    """The progress of a recording: ``path``, ``rows`` so far, and ``error`` if it failed."""

    def __init__(self, path: Path, notes: RowWriter) -> None:
        #: The file of the trace.
        self.path = path
        self._notes = notes

    def __repr__(self) -> str:
        state = f"failed: {self.error}" if self.error else f"{self.rows} rows"
        return f"<Recording {self.path}, {state}>"

    @property
    def rows(self) -> int:
        """The number of rows that were written or are buffered."""
        return self._notes.written + len(self._notes.rows)

    @property
    def error(self) -> KvError | None:
        """The error that ended the recording, or None."""
        return self._notes.error

    def flush(self) -> None:
        """Write buffered rows. No other thread may use the context meanwhile."""
        self._notes.flush()

    def note(self, text: str) -> None:
        """Add a comment to the trace."""
        arguments.text("text", text)
        now = time.perf_counter_ns()
        self._notes.rows.append(("note", (text,), now, now, None, None, None))


def _recorded(native: Any) -> bool:
    """Return whether a context is being recorded, also together with `watch`."""
    while native is not None and not isinstance(native, RecordingNative):
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
    """Record all operations on a context until the end of the block.

    With ``pictures`` False, cells are counted but not recorded. ``claim`` states what the trace
    proves as a scenario. If writing fails, the run continues without a recording, and DiskFull or
    ScriptError is raised at the end of the block. Raises UsageError, DiskFull or Unsupported before
    anything is recorded.
    """
    arguments.instance("context", context, Context, "a Context")
    path, claim = arguments.path("path", path), arguments.text("claim", claim)
    pictures = arguments.flag("pictures", pictures)
    with ExitStack() as stack:
        with context.lock:
            if _recorded(context.native):
                msg = "this context is being recorded already; end that recording first"
                raise UsageError(msg)
            if context.adapters_key or context.params.embeddings:
                msg = "a trace cannot record LoRA adapters or embeddings: record another context"
                raise Unsupported(msg)
            head = trace.current_head(
                context.native.about.variant, context.model.path, context.native.environment
            )
            first = rows(context, head.model)
            start = "rebuilt" if len(first) > 1 else "empty"
            head = replace(head, claim=claim, start=start)
            notes = RowWriter(Path(path), head, first, pictures=pictures)
            stack.callback(notes.close)
            stack.enter_context(intercept(context, lambda: RecordingNative(context, notes)))
        yield Recording(Path(path), notes)
    if notes.error is not None:
        raise notes.error
