"""Record a failing case as a trace, which `pyllamakv trace replay` replays to the same failure.

Every call of the runtime on the library is a row, as in any recording (docs/traces.md). The last
row has the required result instead of the found one, and a `verify` follows, so that the replay
reports the place and kind of the failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pyllamakv.traces import recording, trace
from pyllamakv.traces.recording_native import RecordingNative
from pyllamakv.traces.row_writer import RowWriter
from pyllamakv.traces.script import DECODES
from qa.random_operations.operation_cases import CaseRunner

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.binding.protocol import Native
    from pyllamakv.errors import ScenarioFailed
    from pyllamakv.runtime.context import Context
    from qa.random_operations.manager_operations import ManagerOperations
    from qa.random_operations.operations import Operations
    from qa.random_operations.task import CaseTask

#: Rows that have the result of a promise's name.
_ROWS = {"status": DECODES, "done": ("restore",)}


def record(
    ground: CaseRunner, task: CaseTask, begun: Callable[[Operations | ManagerOperations], None]
) -> ScenarioFailed | None:
    """Run the case of a task again, and write its trace; return the failure."""
    assert task.trace is not None
    notes: list[RowWriter] = []

    def opened() -> Context:
        context = ground.opener()
        notes.append(_begin(context, task))
        _tap(context, notes[0])
        return context

    def again() -> Context:
        assert ground.again is not None
        context = ground.again()
        _tap(context, notes[0])
        return context

    taped = replace(
        ground,
        opener=opened,
        other=ground.other or ground.opener,
        again=again if ground.again else None,
    )
    try:
        failed = taped.play(task.operations, begun)
    finally:
        for each in notes:
            each.close()
    if failed is not None:
        _promise(task.trace, failed)
    return failed


def _begin(context: Context, task: CaseTask) -> RowWriter:
    assert task.trace is not None
    variant, model = context.native.about.variant, context.model.path
    head = trace.current_head(variant, model, task.combination.environment)
    head = replace(head, claim=f"Random operations pass ({task.combination}).")
    return RowWriter(task.trace, head, recording.rows(context, head.model), pictures=True)


def _tap(context: Context, notes: RowWriter) -> None:
    tap = RecordingNative(context, notes)
    context.native = cast("Native", tap)


def _promise(path: Path, failed: ScenarioFailed) -> None:
    """Write the required result of the failing row, and a check of cells and logits."""
    head, *rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "end" not in row]
    promise: dict[str, Any] = failed.evidence.get("promise", {})
    for what, value in promise.items():
        row = next((row for row in reversed(rows) if row["op"] in _ROWS.get(what, ())), None)
        if row is not None:
            row["result"] = {what: value}
        elif what == "holes":
            rows.append({"op": "expect", "holes": value})
    rows.append({"op": "note", "text": str(failed).splitlines()[0]})
    rows.append({"op": "verify"})
    lines = [json.dumps(each) for each in (head, *rows)]
    path.write_text("\n".join([*lines, trace.end(len(rows))]) + "\n", encoding="utf-8")
