"""Draw the cells of a recorded run: `pyllamakv view`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyllamakv.errors import ScriptError, UsageError

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[Path, typer.Argument(help="A trace that `run --trace` recorded.")],
    width: Annotated[int, typer.Option("--width", min=8, help="Cells in a line.")] = 64,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write the pictures into this folder as SVG.")
    ] = None,
    line: Annotated[int, typer.Option("--line", min=0, help="Only this line of the trace.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw the cells after every operation of a trace that changed them."""
    from rich.console import Console

    from pyllamakv.harness import cellmap
    from pyllamakv.harness import trace as traces

    _, lines = traces.read(trace)
    shown = [(number, each) for number, each in traces.pictures(lines) if line in (0, number)]
    if not shown:
        where = f"line {line} of {trace}" if line else str(trace)
        raise ScriptError(f"{where} has no cells to draw: record it with `pyllamakv run --trace`")
    if as_json:
        json.dump(
            [
                {"line": number, "used": each.used, "holes": each.holes[0], **each.to_json()}
                for number, each in shown
            ],
            sys.stdout,
            indent=1,
        )
        sys.stdout.write("\n")
        return
    if svg is not None:
        if svg.exists() and not svg.is_dir():
            raise UsageError(f"{svg} is a file; --svg takes a folder")
        svg.mkdir(parents=True, exist_ok=True)
        for number, each in shown:
            path = svg / f"{number:04d}.svg"
            path.write_text(cellmap.svg(each, width), encoding="utf-8")
            sys.stdout.write(f"{path}\n")
        return
    console = Console(soft_wrap=True)
    for number, each in shown:
        console.print(f"line {number}", style="dim")
        console.print(cellmap.draw(each, width))
