"""Write source trees of releases, compare and remove them: `pyllamakv upstream sync`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import AllTrees, Json, To, release_names
from pyllamakv.cli.stdout import write_json, write_lines

if TYPE_CHECKING:
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store
    from pyllamakv.source.vendor import Vendored

#: Commands of `pyllamakv upstream`.
app = typer.Typer(add_completion=False)

Specs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SPEC",
        help="0.3.36 (stock), 0.3.36+patched, 0.3.36+PATCH,PATCH.",
        autocompletion=release_names,
    ),
]


@app.command()
def sync(
    specs: Specs = None,
    *,
    to: To = None,
    as_json: Json = False,
) -> None:
    """Write source trees, fetched and patched; default: newest verified release."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch, vendor, verified
    from pyllamakv.source.store import open_store

    wanted = specs or [verified.newest().name]
    if to is not None and len(wanted) != 1:
        raise errors.UsageError("--to takes one SPEC.")
    store = open_store()
    rows = []
    with progress_bar.progress() as progress:
        for spec in wanted:
            name, series = _parse(spec)
            release = fetch.ensure(name, progress=progress)
            commit = _commit(store, release, series)
            vendored, done = vendor.sync(
                store, release, commit, spec=spec, series=series, folder=to
            )
            rows.append(_facts(vendored) | {"written": done.written, "removed": done.removed})
    if as_json:
        write_json(rows)
    else:
        write_lines(
            f"{row['spec']} {row['folder']} ({row['written']} written, {row['removed']} removed)"
            for row in rows
        )


@app.command()
def status(specs: Specs = None, *, as_json: Json = False) -> None:
    """List files that differ from upstream and patches; default: all trees."""
    from pyllamakv.source import vendor
    from pyllamakv.source.store import open_store

    store = open_store()
    chosen = [vendor.find(spec) for spec in specs] if specs else vendor.listed()
    if not chosen:
        raise errors.UsageError("Nothing has been vendored: run `pyllamakv upstream sync`.")
    found = {}
    for vendored in chosen:
        stale = _stale(store, vendored)
        lines = vendor.verify(store, vendored).lines()
        found[vendored.spec] = [*([stale] if stale else []), *lines]
    if as_json:
        write_json(found)
    else:
        for spec, lines in found.items():
            write_lines([f"{spec}: {f'{len(lines)} differ' if lines else 'good'}"])
            write_lines(f"  {line}" for line in lines)
    bad = [f"{spec}: {line}" for spec, lines in found.items() for line in lines]
    if bad:
        changed = " ".join(shlex.quote(spec) for spec, lines in found.items() if lines)
        raise errors.TreeDirty(
            f"{len(bad)} files differ from the vendored tree, first {bad[0]}; "
            f"`pyllamakv upstream sync {changed}` restores them",
            bad,
        )


@app.command()
def clean(
    specs: Specs = None,
    *,
    every: AllTrees = False,
    as_json: Json = False,
) -> None:
    """Remove source trees; fetched releases are kept."""
    from pyllamakv.source import vendor

    if bool(specs) == every:
        raise errors.UsageError("Name what to remove, or use --all.")
    chosen = vendor.listed() if every else [vendor.find(spec) for spec in specs or ()]
    removed = [str(vendor.clean(vendored)) for vendored in chosen]
    if as_json:
        write_json(removed)
    else:
        write_lines(removed)


def _parse(spec: str) -> tuple[str, tuple[str, ...] | None]:
    from pyllamakv.building import variant

    parsed = variant.parse(spec)
    variant.definitions(parsed.series or ())  # suggests stock and patched as well
    return parsed.release, parsed.series


def _commit(store: Store, release: Release, series: tuple[str, ...] | None) -> str:
    if series == ():
        return release.commit
    from pyllamakv.patching import apply

    return apply.apply(release, series, store=store).commit


def _stale(store: Store, vendored: Vendored) -> str:
    """Warn if a vendored tree differs from upstream with the present patches."""
    from pyllamakv.source import fetch, spec_resolver

    if vendored.release.startswith(("path:", "git:")):
        return ""
    release = fetch.fetch(spec_resolver.resolve(vendored.release))
    tree = store.tree_of(_commit(store, release, vendored.series))
    return "" if tree == vendored.tree else f"outdated: the patches now produce tree {tree}"


def _facts(vendored: Vendored) -> dict[str, Any]:
    return asdict(vendored)
