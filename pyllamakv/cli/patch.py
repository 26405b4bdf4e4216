"""Show, apply, export, lint and rebase the patches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
Patches = Annotated[
    Path | None,
    typer.Option("--patches", help="A foreign patch file or folder instead of the shipped series."),
]


@app.command()
def status(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]...")] = None,
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
    chosen = _releases(names or [], every=every)
    with showing.progress() as progress:
        found = statuses.status(chosen, series=_series(patches), progress=progress)
    if as_json:
        _json([status.as_json() for status in found])
    elif annotate:
        _lines(statuses.github(found))
    else:
        patch_views.status(found, hunks=hunks)
    if any(not status.good and status.state != "not-meant" for status in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


@app.command()
def apply(
    release: str,
    names: Annotated[list[str] | None, typer.Argument(metavar="[PATCH]...")] = None,
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
    target = _release(release)
    with showing.progress() as progress:
        patched = applying.apply(
            target, names or None, series=_series(patches), store=store, progress=progress
        )
    if to is not None:
        store.export(patched.commit, to)
    for skip in patched.skipped:
        _note(f"left out: {skip.id}: {skip.reason}")
    facts = {
        "release": patched.release,
        "commit": patched.commit,
        "tree": patched.tree,
        "digest": patched.digest,
        "patches": [f"{text.id}@{text.base}" for text in patched.texts],
        "skipped": {skip.id: skip.reason for skip in patched.skipped},
    }
    _result(facts, as_json)


@app.command()
def export(
    names: Annotated[list[str] | None, typer.Argument(metavar="[PATCH]...")] = None,
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
    from pyllamakv.patching import export as exporting
    from pyllamakv.patching import series as loading

    if folder is not None and (check or base is None or len(names or []) != 1):
        raise errors.UsageError("--from wants one PATCH, --base, and no --check.")
    series = loading.load(patches, missing_ok=folder is not None)
    chosen = exporting.chosen(series, names or [], base)
    if not check:
        written = exporting.write(series, chosen, folder)
        return _result({"written": [str(path) for path in written]}, as_json)
    found = exporting.check(series, chosen)
    bad = [one for one in found if not one.same]
    if as_json:
        _json([one.__dict__ for one in found])
    else:
        _lines(
            f"{one.id} {one.base}: {one.kind}{one.detail and ': ' + one.detail}" for one in found
        )
    if bad:
        raise typer.Exit(errors.PatchLintError.exit_code)
    return None


@app.command()
def lint(patches: Patches = None, as_json: Json = False) -> None:
    """Check headers, style, files and the shared logic of the series."""
    from pyllamakv.patching import lint as linting

    found = linting.lint(patches, scenarios=_scenarios())
    if as_json:
        _json([finding.__dict__ for finding in found])
    else:
        _lines(map(str, found))
        _note(f"{len(found)} fault(s)")
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

    series = _shipped(patches)
    if name is None:
        facts = [patch_views.facts(patch) for patch in series]
        return _json(facts) if as_json else patch_views.series(facts)
    patch = series.definition(name)
    if base is not None:
        text = patch.text(base).patch.data
        sys.stdout.buffer.write(text)
        return None
    return _json(patch_views.facts(patch)) if as_json else patch_views.patch(patch)


def _shipped(patches: Path | None) -> Series:
    from pyllamakv.patching import series

    return _series(patches) or series.load()


def _series(patches: Path | None) -> Series | None:
    from pyllamakv.patching import directory

    return None if patches is None else directory.load(patches)


def _release(name: str) -> Release:
    from pyllamakv.source import releases

    return releases.resolve(name)


def _releases(names: Sequence[str], *, every: bool) -> list[Release]:
    from pyllamakv.source import lock
    from pyllamakv.source.store import open_store

    if names:
        return [_release(name) for name in names]
    known = sorted(lock.known().values(), key=lambda release: release.order)
    store = open_store()
    found = [release for release in known if every or store.has(release)]
    if not found:
        raise errors.UsageError("No release is fetched yet: name one, or use --all.")
    return found


def _scenarios() -> frozenset[str] | None:
    """Return the names of the scenarios, or None where the harness does not load."""
    try:
        from pyllamakv.harness import scenario
    except ImportError:
        return None
    return frozenset(scenario.discover())


def _result(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return _json(facts)
    for key, value in facts.items():
        if isinstance(value, list):
            _lines(f"{key}: {item}" for item in value)
        elif not isinstance(value, dict):
            _lines([f"{key}: {value}"])
    return None


def _json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")


def _lines(lines: Any) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
