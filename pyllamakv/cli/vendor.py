"""Put a release's tree in place, verify it, clean up."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import Json
from pyllamakv.source import spec_resolver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store
    from pyllamakv.source.vendor import Vendored

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Specs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SPEC]...", help="0.3.9, 0.3.9+patched, 0.3.9+PATCH,PATCH."),
]


@app.command()
def sync(
    specs: Specs = None,
    *,
    to: Annotated[
        Path | None, typer.Option("--to", help="Another folder than the home's; one SPEC only.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put trees in place (default: 0.3.9), fetched and patched as the spec says."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch, releases, vendor
    from pyllamakv.source.store import open_store

    wanted = specs or [releases.DEFAULT_RELEASE]
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
        _json(rows)
    else:
        _lines(
            f"{row['spec']} {row['folder']} ({row['written']} written, {row['removed']} removed)"
            for row in rows
        )


@app.command()
def verify(specs: Specs = None, *, as_json: Json = False) -> None:
    """Name each file that differs from upstream + patches (default: all that is vendored)."""
    from pyllamakv.source import vendor
    from pyllamakv.source.store import open_store

    store = open_store()
    chosen = [vendor.find(spec) for spec in specs] if specs else vendor.listed()
    if not chosen:
        raise errors.UsageError("Nothing is vendored yet: run `pyllamakv vendor sync`.")
    found = {}
    for vendored in chosen:
        stale = _stale(store, vendored)
        lines = vendor.verify(store, vendored).lines()
        found[vendored.spec] = [*([stale] if stale else []), *lines]
    if as_json:
        _json(found)
    else:
        for spec, lines in found.items():
            _lines([f"{spec}: {f'{len(lines)} differ' if lines else 'good'}"])
            _lines(f"  {line}" for line in lines)
    bad = [f"{spec}: {line}" for spec, lines in found.items() for line in lines]
    if bad:
        raise errors.TreeDirty(
            f"{len(bad)} files differ from what was vendored, first {bad[0]}; "
            "`pyllamakv vendor sync` puts them right",
            bad,
        )


@app.command()
def clean(
    specs: Specs = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Everything that is vendored.")] = False,
    as_json: Json = False,
) -> None:
    """Remove vendored trees; the store keeps the releases."""
    from pyllamakv.source import vendor

    if bool(specs) == every:
        raise errors.UsageError("Name what to remove, or use --all.")
    chosen = vendor.listed() if every else [vendor.find(spec) for spec in specs or ()]
    removed = [str(vendor.clean(vendored)) for vendored in chosen]
    if as_json:
        _json(removed)
    else:
        _lines(removed)


def _parse(spec: str) -> tuple[str, tuple[str, ...] | None]:
    from pyllamakv.building import variant

    parsed = variant.parse(spec)
    return parsed.release, parsed.series


def _commit(store: Store, release: Release, series: tuple[str, ...] | None) -> str:
    if series == ():
        return release.commit
    from pyllamakv.patching import apply

    return apply.apply(release, series, store=store).commit


def _stale(store: Store, vendored: Vendored) -> str:
    """Say when upstream + patches would now be another tree than the one put in place."""
    from pyllamakv.source import fetch

    if vendored.release.startswith(("path:", "git:")):
        return ""
    release = fetch.fetch(spec_resolver.resolve(vendored.release))
    tree = store.tree_of(_commit(store, release, vendored.series))
    return "" if tree == vendored.tree else f"stale: upstream + patches is tree {tree} now"


def _facts(vendored: Vendored) -> dict[str, Any]:
    return asdict(vendored)


def _json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _lines(lines: Sequence[str] | Any) -> None:
    from pyllamakv.printable import printable

    # Names of files and URLs are anybody's, and could give orders to the terminal.
    sys.stdout.writelines(printable(line) + "\n" for line in lines)
