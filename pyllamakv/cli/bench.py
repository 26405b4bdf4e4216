"""Measure, print, and write BENCHMARKS.md."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)

#: Group -> whether it runs when no group is named; `whole` takes minutes.
GROUPS = {"calls": True, "moving": True, "whole": False}


@app.command()
def bench(
    groups: list[str] = typer.Argument(None, help="calls, moving, whole; the first two if none."),
    write: Path = typer.Option(None, help="Write the figures into this document and its JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure ratios side by side; `whole` builds a release twice from an empty home."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pyllamakv.bench import calls, document, moving, whole
    from pyllamakv.bench.figure import Figure

    chosen = groups or [name for name, default in GROUPS.items() if default]
    for name in chosen:
        if name not in GROUPS:
            msg = f"there is no benchmark {name!r}: choose from {', '.join(GROUPS)}"
            raise UsageError(msg)
    command = " ".join(["pyllamakv bench", *(groups or [])])
    console = Console(stderr=True)
    found: list[Figure] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)

        def tick() -> None:
            progress.advance(task)

        for name in chosen:
            progress.update(task, description=name)
            if name == "calls":
                for each in (
                    calls.imports,
                    calls.first_use,
                    calls.repeated_build,
                    calls.snapshot,
                    calls.decode_call,
                ):
                    found.append(each(tick).dated(command))
            elif name == "moving":
                found += [figure.dated(command) for figure in moving.figures(tick)]
            else:
                found += [figure.dated(command) for figure in whole.figures(tick)]
    if write is not None:
        document.write(write, found)
    if as_json:
        sys.stdout.write(json.dumps([asdict(figure) for figure in found], indent=1) + "\n")
    else:
        sys.stdout.write(document.render(found))
