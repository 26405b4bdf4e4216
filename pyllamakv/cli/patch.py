"""Show, apply, export, lint and rebase the patches; measure drift, take in foreign ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import Base, Json, PatchNames, Releases
from pyllamakv.printable import printable
from pyllamakv.source import spec_resolver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyllamakv.patching.patch_import import ApplyResult
    from pyllamakv.patching.rebase import Rebased
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Patches = Annotated[
    Path | None,
    typer.Option("--patches", help="A foreign patch file or folder instead of the shipped series."),
]


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
    from pyllamakv.cli import patch_views, progress_bar
    from pyllamakv.patching import status as statuses

    if annotate not in (None, "github"):
        raise errors.UsageError(f"--annotate knows `github` only, not {annotate!r}.")
    chosen = _releases_of(names or [], every=every)
    with progress_bar.progress() as progress:
        found = statuses.status(chosen, series=_series_of(patches), progress=progress)
    if as_json:
        _to_json([status.as_json() for status in found])
    elif annotate:
        _lines(statuses.github_annotations(found))
    else:
        patch_views.status(found, hunks=hunks)
    if any(not status.good and status.state != "not-applicable" for status in found):
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
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import apply as applying
    from pyllamakv.source.store import open_store

    store = open_store()
    target = _release_of(release)
    with progress_bar.progress() as progress:
        patched = applying.apply(
            target, names or None, series=_series_of(patches), store=store, progress=progress
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
        "patches": [(f"{text.id}@{text.base}" if text.base else text.id) for text in patched.texts],
        "skipped": {skip.id: skip.reason for skip in patched.skipped},
    }
    _result(facts, as_json)


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
    chosen = exporting.select_ports(series, names or [], base)
    if not check:
        written = exporting.write(series, chosen, folder)
        return _result({"written": [str(path) for path in written]}, as_json)
    found = exporting.check(series, chosen)
    bad = [one for one in found if not one.same]
    if as_json:
        _to_json([one.__dict__ for one in found])
    else:
        _lines(
            f"{one.id} {one.base}: {one.kind}{one.detail and ': ' + one.detail}" for one in found
        )
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
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import apply as applying
    from pyllamakv.patching import patch_export as exporting
    from pyllamakv.source.store import open_store

    if as_json and to is None:
        raise errors.UsageError("--json wants --to DIR: without it the mails go to stdout.")
    store = open_store()
    target = _release_of(release)
    with progress_bar.progress() as progress:
        patched = applying.apply(
            target, names or None, series=_series_of(patches), store=store, progress=progress
        )
    found = exporting.mail_series(store, target.commit, patched)
    for skip in patched.skipped:
        _note(f"left out: {skip.id}: {skip.reason}")
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
    _result(facts, as_json)


@app.command()
def lint(patches: Patches = None, as_json: Json = False) -> None:
    """Check headers, style, files and the shared logic of the series."""
    from pyllamakv.patching import lint as linting

    found = linting.lint(patches, scenarios=_scenarios())
    if as_json:
        _to_json([finding.__dict__ for finding in found])
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

    series = _series_of(patches)
    if name is None:
        facts = [patch_views.facts(patch) for patch in series]
        return _to_json(facts) if as_json else patch_views.series(facts)
    patch = series.definition(name)
    if base is not None:
        text = patch.port(base).patch.data
        sys.stdout.buffer.write(text)
        return None
    return _to_json(patch_views.facts(patch)) if as_json else patch_views.patch(patch)


@app.command()
def rebase(
    names: PatchNames = None,
    *,
    onto: Annotated[str | None, typer.Option(help="The release to carry the patches to.")] = None,
    to: Annotated[Path | None, typer.Option(help="Write PATCH.patch there instead.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also where a text applies.")] = False,
    go_on: Annotated[bool, typer.Option("--continue", help="The conflict is solved.")] = False,
    skip: Annotated[bool, typer.Option("--skip", help="Leave the waiting patch out.")] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="End it; texts stay as they were.")
    ] = False,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Carry patches over to a release by merging; a conflict waits for a person (exit 3)."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import rebase as rebasing

    if sum((onto is not None, go_on, skip, abort)) != 1:
        raise errors.UsageError("Say one of --onto RELEASE, --continue, --skip, --abort.")
    done: list[dict[str, Any]] = []
    with progress_bar.progress() as progress:
        if onto is not None:
            if not names:
                raise errors.UsageError("Name the patches to carry over.")
            found = rebasing.rebase(
                names, onto, patches=patches, to=to, force=force, progress=progress
            )
        else:
            if to or force or patches:
                raise errors.UsageError("--to, --force and --patches belong to --onto.")
            found = _go_on(_waiting(names or []), go_on=go_on, skip=skip)
        try:
            for one in found:
                done.append(one.as_json())
                if not as_json:
                    _rebased(one)
        except errors.RebaseConflict as error:
            if not as_json:
                raise
            waits = {"folder": error.folder, "files": error.files, "message": str(error)}
            _to_json({"done": done, "waiting": waits})
            raise typer.Exit(error.exit_code) from error
    if as_json:
        _to_json({"done": done, "waiting": None})


def _go_on(id_: str, *, go_on: bool, skip: bool) -> Iterator[Rebased]:
    from pyllamakv.patching import rebase as rebasing

    if go_on:
        yield from rebasing.resume(id_)
    elif skip:
        yield from rebasing.skip(id_)
    else:
        rebasing.abort(id_)


def _waiting(names: list[str]) -> str:
    from pyllamakv.patching import rebase_session
    from pyllamakv.source.store import open_store

    there = rebase_session.ids(open_store())
    if len(names) > 1 or (not names and len(there) > 1):
        raise errors.UsageError(f"Name one waiting patch: {', '.join(there)}.")
    found = names[0] if names else there[0] if there else ""
    if found not in there:
        what = f"No rebase of {found} waits." if found else "No rebase waits."
        raise errors.UsageError(what)
    return found


def _rebased(one: Rebased) -> None:
    where = f": {one.path}" if one.path else ""
    _lines([f"{one.id} onto {one.onto}: {one.state}{where}"])
    for text in one.notes:
        _note(text)
    for loss in one.comparison.missing if one.comparison else ():
        _note(f"missing against the text for {one.base}: {loss}")


@app.command()
def diff(
    name: Annotated[str, typer.Argument(metavar="PATCH")],
    one: Base,
    other: Base,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Compare the texts of a patch for two bases, or in two files: what did the second lose."""
    from pyllamakv.cli import patch_views
    from pyllamakv.patching import port_comparison
    from pyllamakv.patching.definition import Port

    def text(base: str) -> Port:
        if base.endswith((".patch", ".diff")):
            return Port.from_file(base, name)
        return _series_of(patches).definition(name).port(base)

    found = port_comparison.compare(text(one), text(other))
    _to_json(found.as_json()) if as_json else patch_views.comparison(found)
    if found.missing:
        raise typer.Exit(errors.PatchLintError.exit_code)


@app.command()
def drift(
    release: str,
    names: PatchNames = None,
    *,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Show how far a release has drifted from the patches, hunk by hunk, and since when."""
    from pyllamakv.cli import patch_views, progress_bar
    from pyllamakv.patching import drift as drifting

    with progress_bar.progress() as progress:
        found = drifting.drift(
            _release_of(release), names or [], series=_series_of(patches), progress=progress
        )
    _to_json([one.as_json() for one in found]) if as_json else patch_views.drift(found, names or [])
    if any(one.state in ("fails", "blocked") for one in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


@app.command()
def obsolete(
    release: str,
    names: PatchNames = None,
    *,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Show the signs that upstream does a patch's work itself: text, symbols, behaviour.

    The behaviour is that of stock when `pyllamakv matrix run` judged the release last.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import obsolete as judging
    from pyllamakv.verification import result_cache

    series = _series_of(patches)
    seen = result_cache.stock(release)
    stock = {
        patch.id: {name: how for name, how in seen.items() if name in patch.scenarios}
        for patch in series
    }
    with progress_bar.progress() as progress:
        found = judging.obsolete(
            _release_of(release), names or [], series=series, stock=stock, progress=progress
        )
    if as_json:
        return _to_json([one.as_json() for one in found])
    words = {True: "yes", False: "no", None: "unknown"}
    for one in found:
        said = "obsolete" if one.obsolete else f"{one.votes} of 3 signs"
        meant = "" if one.meant else ", and not meant for this release"
        _lines([f"{one.id} on {one.release}: {said}{meant}"])
        _lines(f"  {sign.name}: {words[sign.obsolete]} ({sign.why})" for sign in one.signs)
    return None


@app.command("import")
def take(
    path: Annotated[Path, typer.Argument(metavar="FILE|FOLDER")],
    *,
    id_: Annotated[str, typer.Option("--id", help="Its id in the series.")],
    base: Annotated[str | None, typer.Option(help="The release it is written against.")] = None,
    to: Annotated[Path | None, typer.Option(help="A series folder of your own.")] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="A scenario that tells (default: cures and guards).")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Its title (default: its subject).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Try every release of the lock.")] = False,
    as_json: Json = False,
) -> None:
    """Take a patch of yours into a series, after a strict trial on the releases."""
    from pyllamakv import home
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import patch_import

    tried = {release.name: release for release in _releases_of([], every=every, none=bool(base))}
    if base:
        tried.setdefault(base, _release_of(base))
    with progress_bar.progress() as progress:
        done = patch_import.import_patch(
            path,
            id_,
            list(tried.values()),
            folder=to or home.data("patches"),
            scenarios=scenario or sorted(_scenarios(features=False) or ()),
            base=base,
            title=title,
            progress=progress,
        )
    if as_json:
        return _to_json(done.as_json())
    _lines([f"{done.id}: {done.path}"])
    _lines(_trials(done.trials))
    for finding in done.findings:
        _note(str(finding))
    return None


def _trials(trials: Sequence[ApplyResult]) -> Iterator[str]:
    """Yield where a patch applies, and where not: releases with one reason in one line."""
    for trial in trials:
        if trial.applies:
            moved = f", moved by {trial.offset} lines in all" if trial.offset else ""
            yield f"  {trial.release.name}: applies{moved}"
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        if trial.conflict:
            reason = str(trial.conflict).splitlines()[0]
            reasons.setdefault(reason, []).append(trial.release.name)
    for reason, names in reasons.items():
        yield f"  {', '.join(names)}: {reason}"


def _series_of(patches: Path | None) -> Series:
    """Return the shipped series, or a foreign one."""
    from pyllamakv.patching import foreign_series, series

    return series.load() if patches is None else foreign_series.load(patches)


def _release_of(name: str) -> Release:
    """Return the release that a spec means."""
    return spec_resolver.resolve(name)


def _releases_of(names: Sequence[str], *, every: bool, none: bool = False) -> list[Release]:
    """Return the releases named; without names those fetched, or every one of the lock."""
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    if names:
        return [_release_of(name) for name in names]
    known = sorted(lockfile.known().values(), key=lambda release: release.order)
    store = open_store()
    found = [release for release in known if every or store.has(release)]
    if not found and not none:
        raise errors.UsageError("No release is fetched yet: name one, or use --all.")
    return found


def _scenarios(*, features: bool = True) -> frozenset[str] | None:
    """Return the names of the scenarios, or None where the harness does not load.

    Features are what certain patches bring; of others nobody expects them.
    """
    try:
        from pyllamakv.verification import discovery
    except ImportError:
        return None
    found = discovery.discover()
    return frozenset(name for name, one in found.items() if features or one.kind != "feature")


def _result(facts: dict[str, Any], as_json: bool) -> None:
    """Write facts as lines, or as JSON."""
    if as_json:
        return _to_json(facts)
    for key, value in facts.items():
        if isinstance(value, list):
            _lines(f"{key}: {item}" for item in value)
        elif not isinstance(value, dict):
            _lines([f"{key}: {value}"])
    return None


def _to_json(data: Any) -> None:
    """Write JSON to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")


def _lines(found: Iterable[str]) -> None:
    """Write lines to stdout, without orders to the terminal: patches may be anybody's."""
    sys.stdout.writelines(printable(line, keep="\n\t") + "\n" for line in found)


def _note(text: str) -> None:
    """Write a line to stderr, like `lines`."""
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
