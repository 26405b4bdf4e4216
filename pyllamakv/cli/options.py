"""Define the options and arguments that several commands share, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[str, typer.Option("--backend", help="cpu, rpc, cuda, metal or vulkan.")]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="cpu, rpc, cuda, metal or vulkan; repeatable. [default: cpu]"),
]
Portable = Annotated[bool, typer.Option("--portable", help="Use builds for any processor.")]
Series = Annotated[str, typer.Option("--series", help="Use only these shipped patches: a,b.")]
Isolate = Annotated[
    str, typer.Option("--isolate", help="Verify one shipped patch by its own scenarios.")
]
Isolates = Annotated[
    list[str] | None,
    typer.Option("--isolate", help="Verify one shipped patch by its own scenarios; repeatable."),
]
Scenario = Annotated[str, typer.Option("--scenario", help="Run only this scenario.")]
Scenarios = Annotated[
    list[str] | None, typer.Option("--scenario", help="Run only this scenario; repeatable.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ignore the result cache.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")]
Github = Annotated[bool, typer.Option("--github", help="Print GitHub Actions syntax.")]
To = Annotated[Path | None, typer.Option("--to", help="Write to this directory.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep downloaded archives.")]
AllReleases = Annotated[bool, typer.Option("--all", help="Use every known release.")]
AllTrees = Annotated[bool, typer.Option("--all", help="Remove every tree.")]
Releases = Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]...")]
PatchNames = Annotated[list[str] | None, typer.Argument(metavar="[PATCH]...")]
Base = Annotated[str, typer.Argument(metavar="BASE")]
#: A trace or a script, and what it is played on.
Run = Annotated[
    Path, typer.Argument(help="A trace that was recorded, or a script to play.", metavar="RUN")
]
Model = Annotated[str, typer.Option("--model", help="GGUF file or generated model to use.")]
Variant = Annotated[
    str, typer.Option("--variant", help="Build to use: 0.3.9+patched, 0.3.9+stock.")
]
Variants = Annotated[
    list[str] | None, typer.Option("--variant", help="Build to use, or `recorded`; repeatable.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="Maximum number of compute threads.")
]
