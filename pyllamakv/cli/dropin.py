"""Run llama-cpp-python on stock and patched libraries: `pyllamakv dropin`."""

from __future__ import annotations

from typing import Annotated

import typer

from pyllamakv.cli.options import Json, Release
from pyllamakv.cli.stdout import write_json, write_lines
from pyllamakv.source.releases import DEFAULT

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Run llama-cpp-python on stock and patched libraries."""


@app.command()
def setup(
    release: Release = DEFAULT,
    as_json: Json = False,
) -> None:
    """Install llama-cpp-python of a release; print the path of its Python."""
    from pyllamakv.building import peer
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import sources

    with progress_bar.progress() as progress:
        found = peer.install(sources.resolve(release), progress=progress)
    if as_json:
        facts = {"version": found.version, "python": str(found.python), "suite": str(found.suite)}
        write_json(facts)
        return
    write_lines([str(found.python)])
