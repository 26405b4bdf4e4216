"""Reduce a failing trace: `pyllamakv trace minimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyllamakv.cli.options import FailingOn, Json, Model, SmallestTrace
from pyllamakv.cli.stdout import write_json, write_lines
from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Failing trace or script.")],
    variant: FailingOn = "",
    output: SmallestTrace = None,
    model: Model = "",
    as_json: Json = False,
) -> None:
    """Find the smallest trace that fails in the same way, and record it.

    A failure is an unmet expectation, wrong data, lost tokens, a crash or a hang. Ctrl-C ends the
    search and writes the smallest trace found so far.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.traces import minimize, trace_scenario, variant_selection
    from pyllamakv.traces import trace as traces

    head, lines = trace_scenario.load(trace)
    file = traces.model_file(head, model)
    spec, *others = variant_selection.specs(head, [variant])
    if others:
        raise UsageError("minimize accepts one build in --variant")
    folder = variant_selection.variant_folder(spec, head)
    target = output or trace.with_name(f"{trace.name.removesuffix('.jsonl')}.min.jsonl")
    traces.check(target)
    with progress_bar.progress() as progress:

        def report_progress(left: int, runs: int) -> None:
            done = len(lines) - left
            progress(f"{left} of {len(lines)} operations left, {runs} runs", done, len(lines))

        found = minimize.minimize(head, lines, folder, model=file, progress=report_progress)
    minimize.record(head, found.lines, target, spec=spec, model=file)
    facts = {
        "trace": str(target),
        "failure": found.failure,
        "message": found.message,
        "operations": len(found.lines) - 1,
        "before": found.before,
        "runs": found.runs,
        "minimal": found.minimal,
    }
    if as_json:
        write_json(facts)
        return
    minimal = "" if found.minimal else ", not minimal: the search was interrupted"
    left = len(found.lines) - 1
    write_lines(
        [
            f"{found.failure}: {found.message}",
            f"{found.before} operations became {left} in {found.runs} runs{minimal}",
            str(target),
        ]
    )
