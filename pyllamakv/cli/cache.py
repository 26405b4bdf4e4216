"""List, verify and prune prefix stores: `pyllamakv cache`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import Budget, Json, Verbose
from pyllamakv.cli.stdout import write_json, write_lines

if TYPE_CHECKING:
    from pyllamakv.cache.prefix_store import StoreContents

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Store = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of a prefix store.")]


@app.command("list")
def list_pages(path: Store, *, verbose: Verbose = False, as_json: Json = False) -> None:
    """Print the identity and size of a store; with -v, its pages, the last used first."""
    from pyllamakv.cache import prefix_store

    found = prefix_store.scan(path)
    pages = sorted(found.pages.values(), key=lambda page: (-page.used, page.start))
    rows: list[dict[str, Any]] = [
        {
            "page": page.name,
            "kind": page.kind,
            "parent": page.parent,
            "start": page.start,
            "end": page.end,
            "bytes": page.size,
            "used": _time(page.used),
        }
        for page in pages
    ]
    if as_json:
        write_json(_facts(found) | {"stored": rows})
        return
    write_lines(f"{name}: {value}" for name, value in found.identity)
    write_lines([f"pages: {len(pages)}, tokens: {_tokens(found)}, bytes: {found.size}"])
    if found.unusable:
        write_lines([f"unusable files: {len(found.unusable)}; run: pyllamakv cache verify {path}"])
    if verbose and rows:
        write_lines(["", f"{'page':<12} {'kind':<5} {'tokens':>17} {'bytes':>12}  last use"])
        write_lines(
            f"{row['page'][:12]} {row['kind']:<5} {row['start']:>8}..{row['end']:<7} "
            f"{row['bytes']:>12}  {row['used']}"
            for row in rows
        )


@app.command()
def verify(path: Store, *, as_json: Json = False) -> None:
    """Read every page of a store; exits 1 if one cannot be used.

    A cache that uses the store may keep running.
    """
    from pyllamakv.cache import prefix_store

    found = prefix_store.scan(path, contents=True)
    damaged = {
        file: why for file, why in found.unusable.items() if file.suffix != prefix_store.PART
    }
    if as_json:
        write_json(_facts(found) | {"damaged": {file.name: why for file, why in damaged.items()}})
    else:
        write_lines(f"{file.name}: {why}" for file, why in damaged.items())
        write_lines([f"usable pages: {len(found.pages)}, unusable: {len(damaged)}"])
    if damaged:
        raise typer.Exit(1)


@app.command()
def prune(
    path: Store,
    *,
    budget: Budget = None,
    as_json: Json = False,
) -> None:
    """Remove unusable pages, and the pages used least recently beyond a budget."""
    from pyllamakv.cache import prefix_store

    done = prefix_store.prune(path, budget)
    if as_json:
        write_json({"removed": done.removed, "pages": done.pages, "bytes": done.size})
    else:
        write_lines([f"removed pages: {done.removed}, left: {done.pages} ({done.size} bytes)"])


def _facts(found: StoreContents) -> dict[str, Any]:
    return {
        "identity": dict(found.identity),
        "pages": len(found.pages),
        "tokens": _tokens(found),
        "bytes": found.size,
    }


def _tokens(found: StoreContents) -> int:
    return sum(page.end - page.start for page in found.pages.values())


def _time(nanoseconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")
