"""Run llama-cpp-python on stock and patched libraries: `pyllamakv dropin`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Json
from pyllamakv.source import spec_resolver
from pyllamakv.source.releases import DEFAULT_RELEASE

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Run llama-cpp-python on stock and patched libraries."""


@app.command()
def setup(
    release: Annotated[
        str, typer.Argument(help="A release that is a llama-cpp-python.")
    ] = DEFAULT_RELEASE,
    as_json: Json = False,
) -> None:
    """Install the matching llama-cpp-python, without a library, and print its Python."""
    from pyllamakv.building import llama_cpp_python_env
    from pyllamakv.cli import progress_bar

    with progress_bar.progress() as progress:
        found = llama_cpp_python_env.install(spec_resolver.resolve(release), progress=progress)
    if as_json:
        facts = {"version": found.version, "python": str(found.python), "suite": str(found.suite)}
        json.dump(facts, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    sys.stdout.write(f"{found.python}\n")
