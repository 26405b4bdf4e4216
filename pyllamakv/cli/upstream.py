"""List, fetch, add and verify llama.cpp releases; write their source trees."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli import source_trees
from pyllamakv.cli.options import AllReleases, Json, Keep, OlderReleases, Releases
from pyllamakv.cli.stdout import note, write_json, write_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.source.releases import Release

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(source_trees.app)


@app.command("list")
def list_releases(
    *,
    new: Annotated[
        bool,
        typer.Option("--new", help="List newer versions on the package indexes."),
    ] = False,
    every: OlderReleases = False,
    as_json: Json = False,
) -> None:
    """List known releases, and whether they are fetched.

    With --new: versions of llama-cpp-python, node-llama-cpp and xllamacpp on the package indexes
    that are newer than the newest pinned one of the same project, newest upload first.
    """
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    if new:
        _list_new(every, as_json)
        return
    store = open_store()
    if every:
        raise errors.UsageError("--all requires --new: known releases are all listed")
    rows = [
        _facts(release) | {"fetched": store.has(release)} for release in lockfile.known().values()
    ]
    if as_json:
        write_json(rows)
    else:
        _table(rows)


@app.command()
def fetch(
    names: Releases = None,
    *,
    every: AllReleases = False,
    keep: Keep = False,
    as_json: Json = False,
) -> None:
    """Fetch releases and check their hashes; fetched releases are kept."""
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
                # A release that cannot be fetched does not stop the others.
                failed.append(error)
                done.append(_facts(release) | {"error": f"{type(error).__name__}: {error}"})
                continue
            done.append(_facts(release))
    if as_json:
        write_json(done)
    else:
        write_lines(_line(facts) for facts in done)
    if failed:
        raise failed[0]


@app.command()
def verify(names: Releases = None, *, as_json: Json = False) -> None:
    """Check fetched releases against the lock; default: all of them."""
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    store = open_store()
    known = list(lockfile.known().values())
    wanted = _chosen(names) if names else [r for r in known if store.has(r)]
    if not wanted:
        raise errors.UsageError("No release has been fetched: run `pyllamakv upstream fetch`.")
    found = {release.name: store.problems(release) for release in wanted}
    if as_json:
        write_json(found)
    else:
        write_lines(f"{name}: {'; '.join(words) or 'good'}" for name, words in found.items())
    bad = [name for name, words in found.items() if words]
    if bad:
        raise errors.HashMismatch(f"{', '.join(bad)} differ from the lock file; fetch them again.")


@app.command()
def add(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="Version, package with version, archive, git:URL@REF, path:DIR.",
        ),
    ],
    *,
    pin: Annotated[bool, typer.Option("--pin", help="Add to the shipped lock file.")] = False,
    keep: Keep = False,
    as_json: Json = False,
) -> None:
    """Add a release to the lock of the data directory, and fetch it.

    A version names a release of llama-cpp-python. Other packages that contain llama.cpp are
    node-llama-cpp@VERSION (npm) and xllamacpp==VERSION.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch as fetching
    from pyllamakv.source import lockfile

    with progress_bar.progress() as progress:
        place = lockfile.shipped() if pin else None
        release = fetching.add(what, progress=progress, pin=place, keep=keep)
    if as_json:
        write_json(_facts(release))
    else:
        write_lines([_line(_facts(release))])


@app.command("log")
def show_log(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="Only releases that add or remove this text."),
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Only changes in these paths.")
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """List fetched releases as a chain of commits, as `git log -S` does."""
    from pyllamakv.source import release_chain
    from pyllamakv.source.store import open_store

    store = open_store()
    links = release_chain.chain(store)
    if text is not None:
        changed = release_chain.pickaxe(store, text, paths or (), line=links)
        links = [link for link in links if link.release in changed]
    rows = [_facts(link.release) | {"line": link.commit} for link in links]
    if as_json:
        write_json(rows)
    else:
        write_lines(f"{row['line']} {row['date'][:10]} {row['name']}" for row in rows)


def _list_new(every: bool, as_json: bool) -> None:
    from pyllamakv.source import watch

    found = watch.new_versions()
    for problem in found.unreachable:
        note(f"warning: a source did not answer: {problem}")
    if as_json:
        facts = asdict(found)
        if not every:
            del facts["unpinned"]
        write_json(facts)
        return
    listed = watch.newest_first([*found.new, *found.unpinned]) if every else found.new
    width = max((len(each.spec) for each in listed), default=0)
    write_lines(
        f"{each.spec:<{width}}  {each.date[:10] or '-':<10}  {each.source}" for each in listed
    )
    if not found.new:
        note("there is no new version on the indexes that answered")
    if found.unpinned and not every:
        note(f"{len(found.unpinned)} older versions are not pinned; --all lists them")
    if found.lost:
        note(f"removed or changed on their index: {', '.join(found.lost)}")
    if found.moved:
        note(f"at another commit, or gone: {', '.join(found.moved)}")


def _chosen(names: Sequence[str] | None, *, every: bool = False) -> list[Release]:
    from pyllamakv.source import lockfile, spec_resolver

    if every and names:
        raise errors.UsageError("give either releases or --all")
    if every:
        return list(lockfile.known().values())
    if not names:
        raise errors.UsageError("name the releases, or use --all")
    return [spec_resolver.resolve(name) for name in names]


def _facts(release: Release) -> dict[str, Any]:
    return asdict(release)


def _line(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"{facts['name']}: {facts['error']}"
    return f"{facts['name']} {facts['era']} {facts['date'][:10]} {facts['commit']}"


def _table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pyllamakv.printable import printable

    table = Table("release", "era", "date", "commit", "from", "fetched", box=None, pad_edge=False)
    for row in rows:
        source = row["package"] or row["url"] or ""
        cells = [row["name"], row["era"], row["date"][:10], row["commit"][:12], source]
        cells = [escape(printable(cell)) for cell in cells]
        table.add_row(*cells, "yes" if row["fetched"] else "no")
    # A pipe has no width: nothing may be cut there.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(table)
