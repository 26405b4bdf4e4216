"""Show, apply, export, lint, rebase and import patches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import (
    AllReleases,
    Base,
    BaseOption,
    Github,
    Json,
    Patch,
    Patches,
    PatchNames,
    Quick,
    RebasedNames,
    ReleaseName,
    Releases,
    Scenarios,
    To,
    Verbose,
    VerifyingScenarios,
    WithServer,
    patch_names,
    release_names,
)
from pyllamakv.cli.stdout import note, write_json, write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.patch_import import ApplyResult
    from pyllamakv.patching.rebase import Rebased
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release as FoundRelease

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def status(
    names: Releases = None,
    *,
    patches: Patches = "",
    every: AllReleases = False,
    server: WithServer = False,
    verbose: Verbose = False,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Show which patches apply to releases; default: the fetched releases.

    Exit status: 0 all apply, 3 a patch conflicts.
    """
    from pyllamakv.cli import patch_views, progress_bar
    from pyllamakv.patching import status as statuses

    series = _series_of(patches)
    chosen = _releases_of(names or [], every=every, lock=series.lock)
    with progress_bar.progress() as progress:
        found = statuses.status(
            chosen, series=series.every if server else series, progress=progress
        )
    if as_json:
        write_json([status.as_json() for status in found])
    elif github:
        write_lines(statuses.github_annotations(found))
    else:
        patch_views.status(found, verbose=verbose)
    if any(one.bad or one.state == "unknown" for one in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


@app.command()
def apply(
    release: ReleaseName,
    names: PatchNames = None,
    *,
    patches: Patches = "",
    to: To = None,
    as_json: Json = False,
) -> None:
    """Apply patches to a release and print the commit."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import apply as applying
    from pyllamakv.source import tree_export
    from pyllamakv.source.store import open_store

    store = open_store()
    series = _series_of(patches)
    target = _release_of(release, series.lock)
    if to is not None:
        tree_export.check_unchanged(store, to)
    with progress_bar.progress() as progress:
        patched = applying.apply(
            target, names or None, series=series, store=store, progress=progress
        )
    _check_series(patched)
    if to is not None:
        store.export(patched.commit, to)
    facts = {
        "release": patched.release,
        "commit": patched.commit,
        "tree": patched.tree,
        "digest": patched.digest,
        "patches": [(f"{port.id}@{port.base}" if port.base else port.id) for port in patched.ports],
        "skipped": {skip.id: skip.reason for skip in patched.skipped},
    }
    _result(facts, as_json)


def _check_series(patched: PatchedRelease) -> None:
    """Report skipped patches; raise NoPortApplies for those that are meant for the release."""
    patched.check_complete()
    for skip in patched.skipped:
        note(f"skipped {skip.id}: {skip.reason}")


@app.command()
def export(
    names: PatchNames = None,
    *,
    base: BaseOption = None,
    folder: Annotated[
        Path | None, typer.Option("--from", help="Edited tree of `patch apply --to`.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare; write nothing.")] = False,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Regenerate patch files from their commits, or compare with --check."""
    from pyllamakv.patching import patch_export as exporting
    from pyllamakv.patching import port_choice
    from pyllamakv.patching import series as loading

    if folder is not None and (check or base is None or len(names or []) != 1):
        raise errors.UsageError("--from wants one PATCH, --base, and no --check.")
    folder_of = Path(patches) if patches else None
    if folder_of is not None and not (folder_of / "series.toml").is_file():
        raise errors.UsageError(f"{patches} has no series.toml; export needs a series with ports.")
    series = loading.load(folder_of, missing_ok=folder is not None)
    chosen = exporting.select_ports(series, names or [], base)
    if patches:
        series = port_choice.with_requirements(series, loading.load())
    if not check:
        written = exporting.write(series, chosen, folder)
        return _result({"written": [str(path) for path in written]}, as_json)
    found = exporting.check(series, chosen)
    bad = [one for one in found if not one.same]
    if as_json:
        write_json([one.__dict__ for one in found])
    else:
        write_lines(
            f"{one.id} {one.base}: {one.kind}{one.detail and ': ' + one.detail}" for one in found
        )
    if bad:
        raise typer.Exit(errors.PatchLintError.exit_code)
    return None


@app.command("export-series")
def export_series(
    release: ReleaseName,
    names: PatchNames = None,
    *,
    to: To = None,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Write the patches of a release as mails for `git am`.

    Without --to the mails are printed.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import apply as applying
    from pyllamakv.patching import patch_export as exporting
    from pyllamakv.source.store import open_store

    if as_json and to is None:
        raise errors.UsageError("--json wants --to DIR: without it the mails go to stdout.")
    store = open_store()
    series = _series_of(patches)
    target = _release_of(release, series.lock)
    with progress_bar.progress() as progress:
        patched = applying.apply(
            target, names or None, series=series, store=store, progress=progress
        )
    _check_series(patched)
    found = exporting.mail_series(store, target.commit, patched)
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
def lint(patches: Patches = "", as_json: Json = False) -> None:
    """Check headers, style and files of the patches."""
    from pyllamakv.patching import lint as linting

    found = linting.lint(patches or None, scenarios=_scenarios())
    if as_json:
        write_json([finding.__dict__ for finding in found])
    else:
        write_lines(map(str, found))
        note(f"{len(found)} fault(s)")
    if found:
        raise typer.Exit(errors.PatchLintError.exit_code)


@app.command()
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PATCH", help="Patch name; default: all.", autocompletion=patch_names
        ),
    ] = None,
    base: BaseOption = None,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Show all patches, one patch, or one port (--base)."""
    from pyllamakv.cli import patch_views

    series = _series_of(patches)
    if name is None:
        facts = [patch_views.facts(patch) for patch in series.every]
        return write_json(facts) if as_json else patch_views.series(facts)
    patch = series.definition(name)
    if base is not None:
        text = patch.port(base).patch.data
        sys.stdout.buffer.write(text)
        return None
    return write_json(patch_views.facts(patch)) if as_json else patch_views.patch(patch)


@app.command()
def rebase(
    names: RebasedNames = None,
    *,
    onto: Annotated[
        str | None,
        typer.Option(
            help="Release to rebase onto (required to start).", autocompletion=release_names
        ),
    ] = None,
    to: To = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write a port even if one applies.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Continue after resolving a conflict.")
    ] = False,
    skip: Annotated[bool, typer.Option("--skip", help="Skip the patch with the conflict.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Cancel the rebase.")] = False,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Rebase patches onto a release with three-way merges.

    On a conflict it stops with exit status 3: resolve it, then use --continue.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import rebase as rebasing

    if sum((onto is not None, go_on, skip, abort)) != 1:
        raise errors.UsageError("give one of --onto RELEASE, --continue, --skip and --abort")
    done: list[dict[str, Any]] = []
    with progress_bar.progress() as progress:
        if onto is not None:
            if not names:
                raise errors.UsageError("name the patches to rebase")
            found = rebasing.rebase(
                names, onto, patches=patches or None, to=to, force=force, progress=progress
            )
        else:
            if to or force:
                raise errors.UsageError("--to and --force require --onto")
            found = _go_on(_waiting(names or [], patches), go_on=go_on, skip=skip)
        try:
            for one in found:
                done.append(one.as_json())
                if not as_json:
                    _rebased(one)
        except errors.RebaseConflict as error:
            if not as_json:
                raise
            waits = {"folder": error.folder, "files": error.files, "message": str(error)}
            write_json({"done": done, "waiting": waits})
            raise typer.Exit(error.exit_code) from error
    if as_json:
        write_json({"done": done, "waiting": None})


@app.command()
def accept(
    spec: ReleaseName,
    *,
    patches: Patches = "",
    server: WithServer = False,
    as_json: Json = False,
) -> None:
    """Write carried patches as ports for a release.

    Verify the release before with `pyllamakv check RELEASE`, and with `--server` for its patches.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import carry_acceptance
    from pyllamakv.source import fetch

    lock = _series_of(patches).lock
    with progress_bar.progress() as progress:
        release = fetch.ensure(spec, lock=lock, progress=progress)
        done = carry_acceptance.accept(
            release, patches=patches or None, server=server, progress=progress
        )
    if as_json:
        return write_json([one.as_json() for one in done])
    lines = [f"{one.id}: {one.path} (carried from {one.carried_from})" for one in done]
    lines += [f"  {note}" for one in done for note in one.notes]
    return write_lines(lines or [f"no patch is carried to {release.name}"])


def _go_on(id_: str, *, go_on: bool, skip: bool) -> Iterator[Rebased]:
    from pyllamakv.patching import rebase as rebasing

    if go_on:
        yield from rebasing.resume(id_)
    elif skip:
        yield from rebasing.skip(id_)
    else:
        rebasing.abort(id_)


def _waiting(names: list[str], patches: str) -> str:
    """Return the patch whose rebase is in progress; ``patches`` must be its series."""
    from pyllamakv.patching import rebase_session
    from pyllamakv.source.store import open_store

    store = open_store()
    there = rebase_session.ids(store)
    if len(names) > 1 or (not names and len(there) > 1):
        raise errors.UsageError(f"Name one patch whose rebase is in progress: {', '.join(there)}.")
    found = names[0] if names else there[0] if there else ""
    if found not in there:
        what = f"No rebase of {found} is in progress." if found else "No rebase is in progress."
        raise errors.UsageError(what)
    session = rebase_session.load(store, found)
    if patches and session is not None and patches != session.patches:
        used = session.patches or "the shipped series"
        raise errors.UsageError(f"the rebase of {found} was started with {used}, not {patches}")
    return found


def _rebased(one: Rebased) -> None:
    where = f": {one.path}" if one.path else ""
    write_lines([f"{one.id} onto {one.onto}: {one.state}{where}"])
    for text in one.notes:
        note(text)
    for loss in one.comparison.missing if one.comparison else ():
        old = f"port {one.base}" if one.base else "the patch"
        note(f"missing in comparison with {old}: {loss}")


@app.command()
def diff(
    name: Patch,
    one: Base,
    other: Base,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Compare two ports of a patch; exits 1 if the second lost changes."""
    from pyllamakv.cli import patch_views
    from pyllamakv.patching import port_comparison
    from pyllamakv.patching.definition import Port

    def text(base: str) -> Port:
        if base.endswith((".patch", ".diff")):
            return Port.from_file(base, name)
        return _series_of(patches).definition(name).port(base)

    found = port_comparison.compare(text(one), text(other))
    write_json(found.as_json()) if as_json else patch_views.comparison(found)
    if found.missing:
        raise typer.Exit(errors.PatchLintError.exit_code)


@app.command()
def drift(
    release: ReleaseName,
    names: PatchNames = None,
    *,
    patches: Patches = "",
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Show which hunks moved or fail on a release, and since when."""
    from pyllamakv.cli import patch_views, progress_bar
    from pyllamakv.patching import drift as drifting

    series = _series_of(patches)
    with progress_bar.progress() as progress:
        found = drifting.drift(
            _release_of(release, series.lock), names or [], series=series, progress=progress
        )
    if as_json:
        write_json([one.as_json() for one in found])
    else:
        patch_views.drift(found, names or [], verbose=verbose)
    if any(one.bad and one.state != "contained" for one in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


@app.command()
def newest(
    names: Releases = None,
    *,
    patches: Patches = "",
    every: AllReleases = False,
    scenario: Scenarios = None,
    quick: Quick = False,
    apply_only: Annotated[
        bool, typer.Option("--apply-only", help="Build and verify nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the newest release that the whole series fits, and what ends it there.

    By default of the fetched releases. Exit status: 0 found, 3 the series fits none.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.verification import newest as searching

    chosen = _releases_of(names or [], every=every, lock=_series_of(patches).lock)
    with progress_bar.progress() as progress:
        found = searching.newest(
            chosen,
            patches=patches,
            scenarios=scenario or (),
            quick=quick,
            verify=not apply_only,
            progress=progress,
        )
    write_json(found.as_json()) if as_json else write_lines(found.lines())
    if not found.release:
        raise typer.Exit(errors.NoPortApplies.exit_code)


@app.command()
def obsolete(
    release: ReleaseName,
    names: PatchNames = None,
    *,
    patches: Patches = "",
    as_json: Json = False,
) -> None:
    """Show whether upstream already does what a patch does.

    It compares text, symbols, and the last `pyllamakv matrix run` of stock.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import obsolete as judging
    from pyllamakv.verification import result_cache

    series = _series_of(patches)
    seen = result_cache.stock(release, patches)
    stock = {
        patch.id: {name: how for name, how in seen.items() if name in patch.scenarios}
        for patch in series
    }
    with progress_bar.progress() as progress:
        found = judging.obsolete(
            _release_of(release, series.lock),
            names or [],
            series=series,
            stock=stock,
            progress=progress,
        )
    if as_json:
        return write_json([one.as_json() for one in found])
    words = {True: "yes", False: "no", None: "unknown"}
    for one in found:
        result = "obsolete" if one.obsolete else f"{one.votes} of 3 signs"
        meant = "" if one.meant else ", not in its releases"
        write_lines([f"{one.id} on {one.release}: {result}{meant}"])
        write_lines(f"  {sign.name}: {words[sign.obsolete]} ({sign.why})" for sign in one.signs)
    return None


@app.command("import")
def import_patch(
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="Patch file, directory, or git:REPOSITORY@FROM..TO."),
    ] = None,
    *,
    id_: Annotated[str, typer.Option("--id", help="Id of the imported patch.")],
    until: Annotated[
        str | None,
        typer.Option(help="Last release of the patch; without PATH, change that of --id."),
    ] = None,
    base: BaseOption = None,
    to: To = None,
    scenario: VerifyingScenarios = None,
    title: Annotated[str | None, typer.Option(help="Title; default: its subject.")] = None,
    strip: Annotated[
        int, typer.Option("--strip", "-p", min=0, max=9, help="Directories to strip from paths.")
    ] = 1,
    every: AllReleases = False,
    as_json: Json = False,
) -> None:
    """Import patches into a series and try them on releases.

    Files of a directory that are no patches are not imported; the exit status is not 0 then.
    """
    from pyllamakv import home
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import patch_import
    from pyllamakv.source import lockfile

    folder = to or home.data("patches")
    if path is None:
        if until is None:
            raise errors.UsageError("name the PATH of a patch, or --until for an imported one")
        write_lines([str(patch_import.accept_until(folder, id_, until))])
        return
    tried = {release.name: release for release in _releases_of([], every=every, none=bool(base))}
    if base:
        tried.setdefault(base, _release_of(base, folder / lockfile.SERIES_LOCK))
    with progress_bar.progress() as progress:
        done = patch_import.import_patch(
            path if path.startswith("git:") else Path(path),
            id_,
            list(tried.values()),
            folder=folder,
            until=until,
            scenarios=scenario or (),
            base=base,
            title=title,
            strip=strip,
            progress=progress,
        )
    refused = errors.PatchFormatError.exit_code if done.refused else 0
    if as_json:
        write_json(done.as_json())
        raise typer.Exit(refused)
    write_lines(f"{one}: {file}" for one, file in zip(done.ids, done.paths, strict=True))
    write_lines(_trials(done.trials))
    for finding in done.findings:
        note(str(finding))
    for reason in done.refused.values():
        note(f"not imported: {reason}")
    raise typer.Exit(refused)


def _trials(trials: Sequence[ApplyResult]) -> Iterator[str]:
    """Yield where a patch applies, and otherwise releases with the reason, one line each."""
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


def _series_of(patches: str) -> Series:
    from pyllamakv.patching import port_choice

    return port_choice.load_series(patches)


def _release_of(name: str, lock: Path | None = None) -> FoundRelease:
    """Return the release that a spec means; ``lock`` is the lock file of a series."""
    from pyllamakv.source import spec_resolver

    return spec_resolver.resolve(name, lock)


def _releases_of(
    names: Sequence[str], *, every: bool, none: bool = False, lock: Path | None = None
) -> list[FoundRelease]:
    """Return the releases named; without names those fetched, or every one of the lock."""
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    if names:
        return [_release_of(name, lock) for name in names]
    known = sorted(lockfile.known().values(), key=lambda release: release.order)
    store = open_store()
    found = [release for release in known if every or store.has(release)]
    if not found and not none:
        raise errors.UsageError("No release has been fetched: name one, or use --all.")
    return found


def _scenarios() -> frozenset[str] | None:
    """Return the names of the scenarios, or None if they cannot be imported."""
    try:
        from pyllamakv.verification import discovery
    except ImportError:
        return None
    return frozenset(discovery.discover())


def _result(facts: dict[str, Any], as_json: bool) -> None:
    """Write facts as lines, or as JSON."""
    if as_json:
        return write_json(facts)
    for key, value in facts.items():
        if isinstance(value, list):
            write_lines(f"{key}: {item}" for item in value)
        elif not isinstance(value, dict):
            write_lines([f"{key}: {value}"])
    return None
