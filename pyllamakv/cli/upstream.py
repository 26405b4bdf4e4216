"""List, fetch, verify and add upstream releases."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import Json, Releases
from pyllamakv.source import spec_resolver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.source.releases import Release

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command("list")
def list_releases(
    *,
    new: Annotated[bool, typer.Option("--new", help="Ask the index what no lock has.")] = False,
    as_json: Json = False,
) -> None:
    """List the releases of the lock, and whether they are fetched."""
    from pyllamakv.source import lockfile, watch
    from pyllamakv.source.store import open_store

    store = open_store()
    if new:
        news = watch.compare_with_index()
        if as_json:
            _json(asdict(news))
        else:
            _lines(f"{word:<10} {' '.join(names)}" for word, names in asdict(news).items() if names)
        return
    rows = [
        _facts(release) | {"fetched": store.has(release)} for release in lockfile.known().values()
    ]
    if as_json:
        _json(rows)
    else:
        _table(rows)


@app.command()
def fetch(
    names: Releases = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every release of the lock.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the archives.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch releases into the store, checked against the lock; what is there costs nothing."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch as fetching

    wanted = _chosen(names, every=every)
    done: list[dict[str, Any]] = []
    failed: list[errors.KvError] = []
    with progress_bar.progress() as progress:
        for release in wanted:
            try:
                fetching.fetch(release, progress=progress, keep=keep)
            except errors.KvError as error:
                # One release that cannot be had must not keep the others away.
                failed.append(error)
                done.append(_facts(release) | {"error": f"{type(error).__name__}: {error}"})
                continue
            done.append(_facts(release))
    if as_json:
        _json(done)
    else:
        _lines(_line(facts) for facts in done)
    if failed:
        raise failed[0]


@app.command()
def verify(names: Releases = None, *, as_json: Json = False) -> None:
    """Check what the store holds against the lock: commit, tree, every object, era."""
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    store = open_store()
    known = list(lockfile.known().values())
    wanted = _chosen(names) if names else [r for r in known if store.has(r)]
    if not wanted:
        raise errors.UsageError("No release is fetched yet: run `pyllamakv upstream fetch`.")
    found = {release.name: store.problems(release) for release in wanted}
    if as_json:
        _json(found)
    else:
        _lines(f"{name}: {'; '.join(words) or 'good'}" for name, words in found.items())
    bad = [name for name, words in found.items() if words]
    if bad:
        raise errors.HashMismatch(f"{', '.join(bad)} differ from the lock; fetch them again.")


@app.command()
def add(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A version, node-llama-cpp@VERSION, an archive, git:URL@REF or path:DIR.",
        ),
    ],
    *,
    pin: Annotated[
        bool, typer.Option("--pin", help="Write it to the shipped lock, not to the home's.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the archive.")] = False,
    as_json: Json = False,
) -> None:
    """Add a release that the lock has not, and fetch it."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch as fetching
    from pyllamakv.source import lockfile

    with progress_bar.progress() as progress:
        place = lockfile.shipped() if pin else None
        release = fetching.add(what, progress=progress, pin=place, keep=keep)
    if as_json:
        _json(_facts(release))
    else:
        _lines([_line(_facts(release))])


@app.command()
def line(
    text: Annotated[
        str | None, typer.Argument(help="Show only releases that added or removed this text.")
    ] = None,
    paths: Annotated[list[str] | None, typer.Argument(help="Files or folders.")] = None,
    *,
    as_json: Json = False,
) -> None:
    """Chain the fetched releases into one line of commits for git's own tools."""
    from pyllamakv.source import release_chain
    from pyllamakv.source.store import open_store

    store = open_store()
    links = release_chain.chain(store)
    if text is not None:
        changed = release_chain.pickaxe(store, text, paths or (), line=links)
        links = [link for link in links if link.release in changed]
    rows = [_facts(link.release) | {"line": link.commit} for link in links]
    if as_json:
        _json(rows)
    else:
        _lines(f"{row['line']} {row['date'][:10]} {row['name']}" for row in rows)


def _chosen(names: Sequence[str] | None, *, every: bool = False) -> list[Release]:
    from pyllamakv.source import lockfile

    if every and names:
        raise errors.UsageError("Name releases, or use --all, not both.")
    if every:
        return list(lockfile.known().values())
    if not names:
        raise errors.UsageError("Name the releases to fetch, or use --all.")
    return [spec_resolver.resolve(name) for name in names]


def _facts(release: Release) -> dict[str, Any]:
    return asdict(release)


def _line(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"{facts['name']}: {facts['error']}"
    return f"{facts['name']} {facts['era']} {facts['date'][:10]} {facts['commit']}"


def _table(rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pyllamakv.printable import printable

    table = Table("release", "era", "date", "commit", "from", "fetched", box=box.SIMPLE_HEAD)
    for row in rows:
        source = row["package"] or row["url"] or ""
        cells = [row["name"], row["era"], row["date"][:10], row["commit"][:12], source]
        cells = [escape(printable(cell)) for cell in cells]
        table.add_row(*cells, "yes" if row["fetched"] else "no")
    # A pipe has no width: nothing may be cut there.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(table)


def _json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _lines(lines: Any) -> None:
    from pyllamakv.printable import printable

    # Names of files and URLs are anybody's, and could give orders to the terminal.
    sys.stdout.writelines(printable(line) + "\n" for line in lines)
