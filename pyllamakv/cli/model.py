"""List and fetch models from the package index."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from pyllamakv.cli.options import Json, ModelName
from pyllamakv.cli.stdout import write_json, write_lines

if TYPE_CHECKING:
    from pyllamakv.models.catalog import PinnedModel

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command("list")
def list_models(*, as_json: Json = False) -> None:
    """List models that can be fetched, and whether they are."""
    from pyllamakv.models import catalog

    rows = [_facts(model) for model in catalog.known().values()]
    if as_json:
        write_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "size", "licence", "from", "fetched", box=None, pad_edge=False)
    for row in rows:
        source = f"{row['package']} {row['package_version']}"
        size = f"{row['size'] / 1e6:.0f} MB"
        fetched = "yes" if row["fetched"] else "no"
        table.add_row(row["name"], size, row["licence"], source, fetched)
    # A pipe has no width: nothing may be cut there.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def get(name: ModelName, *, as_json: Json = False) -> None:
    """Fetch a model if it is missing, and print the path of its file.

    Options --model of other commands accept the name too.
    """
    from pyllamakv import models
    from pyllamakv.cli import progress_bar

    with progress_bar.progress() as progress:
        path = models.get(name, progress=progress)
    if as_json:
        write_json(_facts(models.known()[name]))
    else:
        write_lines([str(path)])


def _facts(model: PinnedModel) -> dict[str, Any]:
    return asdict(model) | {"path": str(model.path), "fetched": model.fetched}
