"""Run a recorded trace again, on one build or several, and compare: `pyllamakv trace replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import Json, Model, Variants
from pyllamakv.cli.stdout import note, write_json, write_lines

if TYPE_CHECKING:
    from pyllamakv.traces.replay import Replay
    from pyllamakv.traces.trace import Head

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace of `trace record` or `kv.record`.")
    ],
    variants: Variants = None,
    model: Model = "",
    every: Annotated[
        bool, typer.Option("--keep-going", help="Continue after the first divergence.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replay a trace and compare; exits 1 if the recorded build gives other results.

    On the recorded build, all results must be equal. On other builds, decode status, used cells
    and most likely tokens are compared. The LLAMA_… variables of the recording are set.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.traces import replay, variant_selection
    from pyllamakv.traces import trace as traces

    head, lines = traces.read(trace)
    if not head.complete:
        note(f"{trace} is incomplete: found {len(lines)} rows")
    found: list[Replay] = []
    with progress_bar.progress() as progress:
        for spec in variant_selection.specs(head, list(variants or ())):

            def tick(done: int, spec: str = spec) -> None:
                if done % 64 == 0:
                    progress(f"replaying on {spec}", done, len(lines))

            one = replay.replay_on_variant(
                spec, head, lines, model=model, every=every, progress=tick
            )
            found.append(one)
    if as_json:
        recorded = {
            "trace": str(trace),
            "recorded": head.variant,
            "environment": traces.recorded(head.environment),
            "rows": len(lines),
        }
        write_json({**recorded, "replays": [each.to_json() for each in found]})
    else:
        _show(found)
        _show_environment(head)
    raise typer.Exit(1 if any(each.failed for each in found) else 0)


def _show_environment(head: Head) -> None:
    """Print the variables of the replay, and those that the recording did not set."""
    from pyllamakv.traces import trace

    played = trace.recorded(head.environment)
    if played:
        settings = " ".join(f"{name}={value}" for name, value in played.items())
        write_lines([f"under {settings}"])
    ours = played.keys() - head.environment.keys()
    if ours:
        names = ", ".join(sorted(ours))
        write_lines([f"not set in the recording: {names}"])


def _show(found: list[Replay]) -> None:
    from pyllamakv.printable import printable

    columns = ("variant", "rows", "diverges at", "recorded", "now", "cells before", "cells after")
    table: list[tuple[str, ...]] = [columns]
    for each in found:
        name = f"{each.variant} *" if each.recorded else each.variant
        if each.error:
            table.append((name, str(each.rows), f"cannot play it: {each.error}", *[""] * 4))
        elif not each.divergences:
            table.append((name, str(each.rows), "nowhere", *[""] * 4))
        for one in each.divergences:
            table.append((name, str(each.rows), *one.cells()))
    table = [tuple(map(printable, row)) for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write_lines(["  ".join(padded).rstrip()])
    if any(each.recorded for each in found):
        write_lines(["* the build that recorded it"])
