"""Show, apply, export, lint and rebase the patches; measure drift, take in foreign ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pyllamakv import errors
from pyllamakv.cli import patch_carry
from pyllamakv.cli.options import Json, PatchNames, Releases
from pyllamakv.cli.patch_common import (
    Patches,
    lines,
    note,
    release_of,
    releases_of,
    result,
    scenarios,
    series_of,
    to_json,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def status(
    names: Releases = None,
    *,
    patches: Patches = None,
    every: Annotated[bool, typer.Option("--all", help="Every release, fetched if needed.")] = False,
    hunks: Annotated[bool, typer.Option("--hunks", help="Show every hunk.")] = False,
    annotate: Annotated[str | None, typer.Option(help="`github`: annotations.")] = None,
    as_json: Json = False,
) -> None:
    """Show which patches apply to which releases (default: those fetched already)."""
    from pyllamakv.cli import patch_views, showing
    from pyllamakv.patching import status as statuses

    if annotate not in (None, "github"):
        raise errors.UsageError(f"--annotate knows `github` only, not {annotate!r}.")
    chosen = releases_of(names or [], every=every)
    with showing.progress() as progress:
        found = statuses.status(chosen, series=series_of(patches), progress=progress)
    if as_json:
        to_json([status.as_json() for status in found])
    elif annotate:
        lines(statuses.github(found))
    else:
        patch_views.status(found, hunks=hunks)
    if any(not status.good and status.state != "not-meant" for status in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


@app.command()
def apply(
    release: str,
    names: PatchNames = None,
    *,
    patches: Patches = None,
    to: Annotated[Path | None, typer.Option(help="Put the patched tree into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Apply patches to a release and print the commit (default: all that apply)."""
    from pyllamakv.cli import showing
    from pyllamakv.patching import apply as applying
    from pyllamakv.source.store import open_store

    store = open_store()
    target = release_of(release)
    with showing.progress() as progress:
        patched = applying.apply(
            target, names or None, series=series_of(patches), store=store, progress=progress
        )
    if to is not None:
        store.export(patched.commit, to)
    for skip in patched.skipped:
        note(f"left out: {skip.id}: {skip.reason}")
    facts = {
        "release": patched.release,
        "commit": patched.commit,
        "tree": patched.tree,
        "digest": patched.digest,
        "patches": [(f"{text.id}@{text.base}" if text.base else text.id) for text in patched.texts],
        "skipped": {skip.id: skip.reason for skip in patched.skipped},
    }
    result(facts, as_json)


@app.command()
def export(
    names: PatchNames = None,
    *,
    base: Annotated[str | None, typer.Option(help="Only the text for this base.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--from", help="A tree with the change made by hand.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare only, write nothing.")] = False,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Write patch files from their commits, or compare them with it (--check)."""
    from pyllamakv.patching import patch_export as exporting
    from pyllamakv.patching import series as loading

    if folder is not None and (check or base is None or len(names or []) != 1):
        raise errors.UsageError("--from wants one PATCH, --base, and no --check.")
    series = loading.load(patches, missing_ok=folder is not None)
    chosen = exporting.chosen(series, names or [], base)
    if not check:
        written = exporting.write(series, chosen, folder)
        return result({"written": [str(path) for path in written]}, as_json)
    found = exporting.check(series, chosen)
    bad = [one for one in found if not one.same]
    if as_json:
        to_json([one.__dict__ for one in found])
    else:
        lines(f"{one.id} {one.base}: {one.kind}{one.detail and ': ' + one.detail}" for one in found)
    if bad:
        raise typer.Exit(errors.PatchLintError.exit_code)
    return None


@app.command("export-series")
def export_series(
    release: str,
    names: PatchNames = None,
    *,
    to: Annotated[
        Path | None, typer.Option(help="A folder for the mails; without it they go to stdout.")
    ] = None,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Write the patches of a release as mails for `git am` (default: all that apply)."""
    from pyllamakv.cli import showing
    from pyllamakv.patching import apply as applying
    from pyllamakv.patching import patch_export as exporting
    from pyllamakv.source.store import open_store

    if as_json and to is None:
        raise errors.UsageError("--json wants --to DIR: without it the mails go to stdout.")
    store = open_store()
    target = release_of(release)
    with showing.progress() as progress:
        patched = applying.apply(
            target, names or None, series=series_of(patches), store=store, progress=progress
        )
    found = exporting.mail_series(store, target.commit, patched)
    for skip in patched.skipped:
        note(f"left out: {skip.id}: {skip.reason}")
    if to is None:
        for mail in found:
            sys.stdout.buffer.write(mail.data)
        return
    written = exporting.write_mails(found, to, base=target.commit, release=target.name)
    facts = {
        "release": target.name,
        "base": target.commit,
        "tree": patched.tree,
        "mails": [str(path) for path in written],
    }
    result(facts, as_json)


@app.command()
def lint(patches: Patches = None, as_json: Json = False) -> None:
    """Check headers, style, files and the shared logic of the series."""
    from pyllamakv.patching import lint as linting

    found = linting.lint(patches, scenarios=scenarios())
    if as_json:
        to_json([finding.__dict__ for finding in found])
    else:
        lines(map(str, found))
        note(f"{len(found)} fault(s)")
    if found:
        raise typer.Exit(errors.PatchLintError.exit_code)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="[PATCH]")] = None,
    base: Annotated[str | None, typer.Option(help="Print the text for this base.")] = None,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Show the series, one patch, or one text."""
    from pyllamakv.cli import patch_views

    series = series_of(patches)
    if name is None:
        facts = [patch_views.facts(patch) for patch in series]
        return to_json(facts) if as_json else patch_views.series(facts)
    patch = series.definition(name)
    if base is not None:
        text = patch.text(base).patch.data
        sys.stdout.buffer.write(text)
        return None
    return to_json(patch_views.facts(patch)) if as_json else patch_views.patch(patch)


app.command("rebase")(patch_carry.rebase)
app.command("diff")(patch_carry.diff)
app.command("drift")(patch_carry.drift)
app.command("obsolete")(patch_carry.obsolete)
app.command("import")(patch_carry.take)
