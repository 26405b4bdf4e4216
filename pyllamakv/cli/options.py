"""Define the options and arguments that several commands share, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[str, typer.Option("--backend", help="cpu, rpc, cuda, metal or vulkan.")]
Portable = Annotated[
    bool, typer.Option("--portable", help="Use builds that are not tuned for this machine.")
]
Releases = Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]...")]
PatchNames = Annotated[list[str] | None, typer.Argument(metavar="[PATCH]...")]
Base = Annotated[str, typer.Argument(metavar="BASE")]
#: A trace or a script, and what it is played on.
Run = Annotated[
    Path, typer.Argument(help="A trace that was recorded, or a script to play.", metavar="RUN")
]
RecordedModel = Annotated[str, typer.Option("--model", help="Path of the recorded model.")]
PlayedVariant = Annotated[
    str, typer.Option("--variant", help="Play it on this build now, also a trace.")
]
PlayedModel = Annotated[
    str, typer.Option("--model", help="Play a script on this model, whatever it names.")
]
