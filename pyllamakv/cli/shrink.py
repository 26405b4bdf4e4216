"""Make a failing trace minimal: `pyllamakv shrink`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyllamakv.cli.options import Json, RecordedModel
from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[Path, typer.Argument(help="A trace or script that fails.")],
    variant: Annotated[
        str,
        typer.Option("--variant", help="The build it fails on; without it the recorded one."),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write it there; without it beside the trace, as NAME.min.jsonl.",
        ),
    ] = None,
    model: RecordedModel = "",
    as_json: Json = False,
) -> None:
    """Find the fewest operations, of the fewest tokens, that fail in the same way; record them.

    It fails as a scenario does: a claim not met, wrong data, lost tokens, a crash or a hang. Ctrl-C
    ends the search and writes what was found by then.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.traces import minimize, trace_scenario, variant_selection
    from pyllamakv.traces import trace as traces

    head, lines = trace_scenario.load(trace)
    file = traces.model_file(head, model)
    spec, *others = variant_selection.specs(head, [variant])
    if others:
        raise UsageError("--variant takes one build: a trace is shrunk where it fails")
    folder = variant_selection.variant_folder(spec, head)
    target = output or trace.with_name(f"{trace.name.removesuffix('.jsonl')}.min.jsonl")
    traces.check(target)
    with progress_bar.progress() as progress:

        def told(left: int, runs: int) -> None:
            done = len(lines) - left
            progress(f"{left} of {len(lines)} operations left, {runs} runs", done, len(lines))

        found = minimize.minimize(head, lines, folder, model=file, told=told)
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
        json.dump(facts, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    minimal = "" if found.minimal else ", not minimal: the search was interrupted"
    sys.stdout.write(
        f"{found.failure}: {found.message}\n"
        f"{found.before} operations became {len(found.lines) - 1} in {found.runs} runs{minimal}\n"
        f"{target}\n"
    )
