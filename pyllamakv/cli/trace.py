"""Record, replay, show and minimize traces of the KV cache: `pyllamakv trace`."""

from __future__ import annotations

from typing import ClassVar

import typer

from pyllamakv.cli.lazy_group import LazyGroup

#: Command -> help text. Each command is the Typer app of the module of its name.
COMMANDS = {
    "record": "Run a script or prompts, and record a trace.",
    "replay": "Replay a recorded trace and compare results.",
    "view": "Show the KV cache cells of a trace or script.",
    "stats": "Print KV cache statistics of a trace or script.",
    "minimize": "Reduce a failing trace.",
}


class TraceCommands(LazyGroup):
    """The commands of `pyllamakv trace`."""

    modules: ClassVar = {name: (f"pyllamakv.cli.{name}", text) for name, text in COMMANDS.items()}


app = typer.Typer(cls=TraceCommands, no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Record, replay, show and minimize traces of the KV cache."""
