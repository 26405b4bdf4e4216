"""Carry patches from release to release: rebase, diff, drift, import, obsolete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.cli.options import Base, Json, PatchNames
from pyllamakv.cli.patch_common import (
    Patches,
    lines,
    note,
    release_of,
    releases_of,
    scenarios,
    series_of,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.patch_import import Trial
    from pyllamakv.patching.rebase import Rebased


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
    from pyllamakv.cli import showing
    from pyllamakv.patching import rebase as rebasing

    if sum((onto is not None, go_on, skip, abort)) != 1:
        raise errors.UsageError("Say one of --onto RELEASE, --continue, --skip, --abort.")
    done: list[dict[str, Any]] = []
    with showing.progress() as progress:
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
        except errors.RebaseWaiting as error:
            if not as_json:
                raise
            waits = {"folder": error.folder, "files": error.files, "message": str(error)}
            to_json({"done": done, "waiting": waits})
            raise typer.Exit(error.exit_code) from error
    if as_json:
        to_json({"done": done, "waiting": None})


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
    lines([f"{one.id} onto {one.onto}: {one.state}{where}"])
    for text in one.notes:
        note(text)
    for loss in one.comparison.missing if one.comparison else ():
        note(f"missing against the text for {one.base}: {loss}")


def diff(
    name: Annotated[str, typer.Argument(metavar="PATCH")],
    one: Base,
    other: Base,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Compare the texts of a patch for two bases, or in two files: what did the second lose."""
    from pyllamakv.cli import patch_views
    from pyllamakv.patching import compare
    from pyllamakv.patching.definition import PatchText

    def text(base: str) -> PatchText:
        if base.endswith((".patch", ".diff")):
            return PatchText.from_file(base, name)
        return series_of(patches).definition(name).text(base)

    found = compare.compare(text(one), text(other))
    to_json(found.as_json()) if as_json else patch_views.comparison(found)
    if found.missing:
        raise typer.Exit(errors.PatchLintError.exit_code)


def drift(
    release: str,
    names: PatchNames = None,
    *,
    patches: Patches = None,
    as_json: Json = False,
) -> None:
    """Show how far a release has drifted from the patches, hunk by hunk, and since when."""
    from pyllamakv.cli import patch_views, showing
    from pyllamakv.patching import drift as drifting

    with showing.progress() as progress:
        found = drifting.drift(
            release_of(release), names or [], series=series_of(patches), progress=progress
        )
    to_json([one.as_json() for one in found]) if as_json else patch_views.drift(found, names or [])
    if any(one.state in ("fails", "blocked") for one in found):
        raise typer.Exit(errors.PatchConflict.exit_code)


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
    from pyllamakv.cli import showing
    from pyllamakv.patching import obsolete as judging
    from pyllamakv.verification import result_cache

    series = series_of(patches)
    seen = result_cache.stock(release)
    stock = {
        patch.id: {name: how for name, how in seen.items() if name in patch.scenarios}
        for patch in series
    }
    with showing.progress() as progress:
        found = judging.obsolete(
            release_of(release), names or [], series=series, stock=stock, progress=progress
        )
    if as_json:
        return to_json([one.as_json() for one in found])
    words = {True: "yes", False: "no", None: "unknown"}
    for one in found:
        said = "obsolete" if one.obsolete else f"{one.votes} of 3 signs"
        meant = "" if one.meant else ", and not meant for this release"
        lines([f"{one.id} on {one.release}: {said}{meant}"])
        lines(f"  {sign.name}: {words[sign.says]} ({sign.why})" for sign in one.signs)
    return None


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
    from pyllamakv.cli import showing
    from pyllamakv.patching import patch_import

    tried = {release.name: release for release in releases_of([], every=every, none=bool(base))}
    if base:
        tried.setdefault(base, release_of(base))
    with showing.progress() as progress:
        done = patch_import.take(
            path,
            id_,
            list(tried.values()),
            folder=to or home.data("patches"),
            scenarios=scenario or sorted(scenarios(features=False) or ()),
            base=base,
            title=title,
            progress=progress,
        )
    if as_json:
        return to_json(done.as_json())
    lines([f"{done.id}: {done.path}"])
    lines(_trials(done.trials))
    for finding in done.findings:
        note(str(finding))
    return None


def _trials(trials: Sequence[Trial]) -> Iterator[str]:
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
