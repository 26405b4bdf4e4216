"""Run a recorded trace again and compare: `pyllamakv replay`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def command(
    trace: Annotated[Path, typer.Argument(help="A trace that `run --trace` recorded.")],
    variant: Annotated[
        str, typer.Option("--variant", help="Replay on this build, not on the recorded one.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Replay on this model.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a trace again; exit 1 when something came out otherwise.

    On the recorded build everything must be equal; on another one statuses, used cells and the
    likeliest tokens.
    """
    import pyllamakv
    from pyllamakv.harness import script
    from pyllamakv.harness import trace as traces

    head, lines = traces.read(trace)
    with pyllamakv.open(variant or head.variant, isolated=True) as library:
        stage = script.Stage(library.native, model or head.model)
        try:
            same = library.about.variant == head.variant
            found = traces.replay(lines, stage, strict=same)
        finally:
            stage.close()
    if as_json:
        json.dump(
            {
                "variant": library.about.variant,
                "recorded": head.variant,
                "lines": len(lines),
                "differences": [asdict(each) for each in found],
            },
            sys.stdout,
            indent=2,
        )
        sys.stdout.write("\n")
    else:
        for each in found:
            sys.stdout.write(f"{each}\n")
        sys.stdout.write(f"{len(lines)} lines replayed, {len(found)} differences\n")
    raise typer.Exit(1 if found else 0)
