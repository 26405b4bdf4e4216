"""Run a recorded trace again, on one build or several, and compare: `pyllamakv replay`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import Json, RecordedModel

if TYPE_CHECKING:
    from pyllamakv.traces.replay import Replay
    from pyllamakv.traces.trace import Head

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[Path, typer.Argument(help="A trace, of `run --trace` or `kv.record`.")],
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variants",
            "--variant",
            help="Replay on these builds: stock,patched of the recorded release, `recorded`, or "
            "specs as in 0.3.36+patched; repeatable.",
        ),
    ] = None,
    model: RecordedModel = "",
    every: Annotated[
        bool, typer.Option("--all", help="Go on after the first divergence, and tell them all.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Play a trace again; exit 1 when the build that recorded it comes out otherwise.

    On the recorded build everything must be equal; on others how decodes ended, the used cells and
    the likeliest tokens are compared. The variables LLAMA_… are those of the recording, and told.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.traces import replay, variant_selection
    from pyllamakv.traces import trace as traces

    head, lines = traces.read(trace)
    if not head.complete:
        sys.stderr.write(f"{trace} was cut short: what is there has {len(lines)} rows\n")
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
        json.dump({**recorded, "replays": [each.to_json() for each in found]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _show(found)
        _show_environment(head)
    raise typer.Exit(1 if any(each.failed for each in found) else 0)


def _show_environment(head: Head) -> None:
    """Say which variables it was played under, and which of them no recording asked for."""
    from pyllamakv.printable import printable
    from pyllamakv.traces import trace

    played = trace.recorded(head.environment)
    if played:
        said = " ".join(f"{name}={value}" for name, value in played.items())
        sys.stdout.write(f"under {printable(said)}\n")
    ours = played.keys() - head.environment.keys()
    if ours:
        said = ", ".join(sorted(ours))
        sys.stdout.write(f"not so when it was recorded: {printable(said)}\n")


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
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    if any(each.recorded for each in found):
        sys.stdout.write("* the build that recorded it\n")
