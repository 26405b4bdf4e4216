"""Report which patches apply to which releases, hunk by hunk, also after a failure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyllamakv.errors import GitError, SourceError
from pyllamakv.patching import port_choice, trees
from pyllamakv.patching import series as series_module
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.strict_apply import TreeOverlay, place
from pyllamakv.printable import printable
from pyllamakv.source import git_command
from pyllamakv.source.releases import sdist_version
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.hunks import FilePatch
    from pyllamakv.patching.port_choice import AppliedPort, Skipped
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Placement, Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

#: Timeout in seconds for the search of the lines of one file in a history.
_SECONDS = 30
#: The first line of an entry of `git blame --porcelain`: commit, line there, line here.
_BLAMED = re.compile(rb"([0-9a-f]{40,64}) \d+ (\d{1,9})(?: \d+)?$")

State = Literal[
    "applies",
    "offset",
    "carried",
    "contained",
    "manual",
    "fails",
    "blocked",
    "not-applicable",
    "unknown",
]


@dataclass(frozen=True)
class Attempt:
    """The state of one port on a tree: markers that do not hold, and every hunk."""

    base: str
    misses: tuple[str, ...]
    placements: tuple[Placement, ...]

    @property
    def failed(self) -> tuple[Placement, ...]:
        """Return the hunks without a place."""
        return tuple(p for p in self.placements if not p.good)


@dataclass(frozen=True)
class PatchStatus:
    """The state of one patch on one release.

    ``applies``: every hunk is at its recorded position; ``offset``: hunks moved, each to one
    possible position; ``carried``: merged from the nearest port (see `carry`); ``contained``: the
    release has all changes, alone or together with those of other patches; ``manual``: the
    merge has a conflict, or changes other lines than the port; ``fails``: a port is a candidate,
    but a hunk has no position; ``blocked``: a required patch is not applied; ``not-applicable``: no
    port is a candidate. ``port`` is the base of the port in use. ``manual`` has the reason for each
    port that the patch could not be carried from; of a carried patch, these are nearer ports.
    """

    release: str
    id: str
    state: State
    port: str = ""
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    manual: tuple[port_choice.Manual, ...] = ()

    @property
    def good(self) -> bool:
        """Return whether the patch applies, or is carried."""
        return self.state in ("applies", "offset", "carried")

    @property
    def bad(self) -> bool:
        """Return whether the patch is meant for the release and does not apply."""
        return self.state in ("manual", "fails", "blocked")

    @property
    def best(self) -> Attempt | None:
        """Return the port that is used, or the one with the fewest failing hunks."""
        used = [a for a in self.attempts if a.base == self.port] if self.good else []
        ranked = used or sorted(self.attempts, key=lambda a: (bool(a.misses), len(a.failed)))
        return ranked[0] if ranked else None

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "release": self.release,
            "patch": self.id,
            "state": self.state,
            "port": self.port or None,
            "reason": self.reason or None,
            "ports": [
                {
                    "base": attempt.base,
                    "meant": not attempt.misses,
                    "misses": list(attempt.misses),
                    "hunks": [_hunk(p) for p in attempt.placements],
                }
                for attempt in self.attempts
            ],
            "manual": [each.as_json() for each in self.manual],
        }


def status(
    releases: Iterable[Release],
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[PatchStatus, ...]:
    """Try every patch on every release, releases one after another; nothing is written.

    The reason of a contained patch names the commit of upstream, if the release is a local
    repository.
    """
    store = store or open_store()
    series = series_module.load() if series is None else series
    found: list[PatchStatus] = []
    for release in releases:
        rows = of_release(release, series, store, progress)
        found += (_with_commit(one, release, series, store) for one in rows)
    return tuple(found)


def contained(
    release: Release,
    series: Series,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[PatchStatus, ...]:
    """Return the patches that a release contains, each with the advice to drop it as its reason."""
    rows = status([release], series=series, store=store, progress=progress)
    return tuple(one for one in rows if one.state == "contained")


def of_release(
    release: Release, series: Series, store: Store, progress: Progress | None = None
) -> tuple[PatchStatus, ...]:
    """Try every patch on one release; a release that cannot be fetched is `unknown` everywhere."""
    try:
        release = trees.ensure_fetched(store, release, progress)
        tree = trees.StoreTree(store, store.tree_of(release))
    except SourceError as error:
        return tuple(PatchStatus(release.name, p.id, "unknown", reason=str(error)) for p in series)
    tree.fetch(path for patch in series for port in patch.ports for path in port.patch.paths)
    return of_tree(release.name, series, tree, Carrier(store, release, series, progress=progress))


def _with_commit(one: PatchStatus, release: Release, series: Series, store: Store) -> PatchStatus:
    """Add the commit of upstream that completed a contained patch, if the history is there."""
    if one.state != "contained":
        return one
    release = trees.ensure_fetched(store, release)
    tree = trees.StoreTree(store, store.tree_of(release))
    commit = _containing(release, series.definition(one.id), tree)
    return replace(one, reason=f"{one.reason}; it is in {commit}") if commit else one


def _containing(release: Release, definition: Definition, tree: Tree) -> str:
    """Return the newest commit of the lines that a contained patch adds, with its subject.

    Only a local repository has the history. One line of each hunk is searched. Nothing is returned
    for a patch that the release contains only together with later ones, that adds no line, or
    whose lines are as old as the history.
    """
    folder = Path((release.url or "").removeprefix("file://"))
    if release.kind not in ("path", "git") or not release.url or not folder.is_dir():
        return ""
    head = release.commit if release.kind == "git" else "HEAD"
    undone = [port.patch.reversed for port in port_choice.candidates(definition, release.name)]
    draft = TreeOverlay(tree)
    patch = next((p for p in undone if all(found.good for found in draft.dry_run(p))), None)
    commits: list[_Blamed] = []
    for file in patch.files if patch else ():
        entry = tree.entry(file.old) if file.old else None
        lines = _located(entry.data, file) if entry else {}
        if file.old and lines:
            commits += _blame(folder, head, file.old, lines)
    newest = max(commits, key=lambda blamed: blamed.seconds, default=None)
    return f"{newest.commit[:12]} ({printable(newest.subject)})" if newest else ""


def _located(data: bytes, undone: FilePatch) -> dict[int, bytes]:
    """Return the longest line that each hunk adds, by its number in the content of a file.

    ``undone`` is the reversed part of the patch, which removes these lines.
    """
    found: dict[int, bytes] = {}
    placements, _ = place(data, undone)
    for hunk, placement in zip(undone.hunks, placements, strict=True):
        present = [line for line in hunk.lines if line[:1] not in (b"+", b"\\")]
        marked = {
            placement.at + number: line[1:]
            for number, line in enumerate(present)
            if line[:1] == b"-" and line[1:].strip()
        }
        if marked:
            longest = max(marked, key=lambda number: len(marked[number].strip()))
            found[longest] = marked[longest]
    return found


@dataclass(frozen=True)
class _Blamed:
    """The commit that brought a line: its id, the time of its commit in seconds, its subject."""

    commit: str
    seconds: int
    subject: str


def _blame(folder: Path, head: str, path: str, lines: Mapping[int, bytes]) -> list[_Blamed]:
    """Return the commits that brought lines of a file, except the first commit of the history.

    A line that is another one in ``head``, as below a local change, has no commit.
    """
    ranges = [word for number in lines for word in ("-L", f"{number},{number}")]
    # The list of ignored commits is a file that the configuration of the repository may name.
    options = ("--porcelain", "--no-root", "--no-textconv", "--ignore-revs-file=")
    try:  # the directory may be no repository, and its history long
        done = git_command.run(
            folder, "blame", *options, *ranges, head, "--", path, bounded=True, timeout=_SECONDS
        )
    except GitError:
        return []
    known: dict[str, dict[str, str]] = {}
    found: dict[str, None] = {}
    commit, number = "", 0
    for line in done.stdout.split(b"\n"):
        if line[:1] == b"\t":
            if lines.get(number, b"").rstrip(b"\r\n") == line[1:].rstrip(b"\r"):
                found[commit] = None
        elif match := _BLAMED.match(line):
            commit, number = match[1].decode(), int(match[2])
        else:
            key, _, text = line.decode("utf-8", "replace").partition(" ")
            known.setdefault(commit, {})[key] = text
    return [
        _Blamed(commit, int(facts["committer-time"]), facts["summary"])
        for commit in found
        if "boundary" not in (facts := known[commit])
    ]


def of_tree(
    name: str, series: Series, tree: Tree, carrier: Carrier | None = None
) -> tuple[PatchStatus, ...]:
    """Try every patch of a series, each on top of all those before it that apply."""
    draft = TreeOverlay(tree)
    found: list[PatchStatus] = []
    choices = port_choice.choose_each(tuple(series), draft, tree, name, carrier)
    for definition in series:
        ports = port_choice.candidates(definition, name)
        # Before the choice, which changes the draft.
        attempts = tuple(_attempt(port, draft, tree) for port in ports)
        applied = [one.id for one in found if one.good or one.state == "contained"]
        found.append(_one(name, definition, attempts, next(choices), applied))
    return tuple(found)


def _one(
    release: str,
    definition: Definition,
    attempts: tuple[Attempt, ...],
    chosen: AppliedPort | Skipped,
    applied: Sequence[str],
) -> PatchStatus:
    ports = port_choice.candidates(definition, release)
    if isinstance(chosen, port_choice.AppliedPort) and chosen.port.carried_from:
        base = chosen.port.carried_from
        places = [f"{conflict.file}:{conflict.line}" for conflict in chosen.conflicts]
        by_tokens = f", by tokens at {', '.join(places)}" if places else ""
        same = "each function has the same changes"
        if chosen.contained:
            places_of = ", ".join(chosen.contained)
            same += f", except those that {release} contains at {places_of}: drop these"
        others = [f"not from {each.base}: {each.reason}" for each in chosen.manual]
        reason = "; ".join([f"merged from port {base}{by_tokens}", same, *others])
        return PatchStatus(release, definition.id, "carried", base, reason, attempts, chosen.manual)
    if isinstance(chosen, port_choice.AppliedPort):
        moved = any(placement.offset for placement in chosen.placements)
        state: State = "offset" if moved else "applies"
        return PatchStatus(release, definition.id, state, chosen.port.base, "", attempts)
    meant = [port for port, attempt in zip(ports, attempts, strict=True) if not attempt.misses]
    lacking = {id_ for port in meant for id_ in port.requires if id_ not in applied}
    if not definition.covers_release(release):
        state = "not-applicable"
    elif chosen.contained:
        state = "contained"
    elif chosen.manual:
        state = "blocked" if all(each.lacks for each in chosen.manual) else "manual"
    elif not meant and definition.author and sdist_version(release) is not None:
        # An imported patch is meant for every release until `patch import --until` says otherwise.
        reason = (
            f"{chosen.reason}; write a port with `pyllamakv patch rebase`, or accept with "
            f"`pyllamakv patch import --until`"
        )
        return PatchStatus(release, definition.id, "fails", "", reason, attempts)
    elif not meant and not chosen.conflicts:
        state = "not-applicable"
    elif lacking and not chosen.conflicts:
        state = "blocked"
    else:
        state = "fails"
    reason = chosen.reason
    if state in ("manual", "fails") and (half := _present(attempts)):
        reason += f"; {release} contains {half}: drop this from the patch"
    return PatchStatus(release, definition.id, state, "", reason, attempts, chosen.manual)


def _present(attempts: Sequence[Attempt]) -> str:
    """Return the hunks of a port that a release contains, of the port with most of them."""
    hunks = [[p for p in each.placements if p.state == "already"] for each in attempts]
    most = max(hunks, key=len, default=[])
    return ", ".join(f"{place.file} hunk {place.hunk}" for place in most)


def _attempt(port: Port, draft: TreeOverlay, tree: Tree) -> Attempt:
    misses = tuple(str(marker) for marker in port.failed_markers(tree))
    return Attempt(port.base, misses, draft.dry_run(port.patch))


def github_annotations(found: Iterable[PatchStatus]) -> list[str]:
    """Write failures as GitHub annotations on the patch files, one line each."""
    lines = []
    for status in found:
        if not status.bad:
            continue
        best = status.best
        bad = best.failed[0] if best and best.failed else None
        base = best.base if best else ""
        file = f"patches/{status.id}/{base}.patch"
        text = f"{status.id} on {status.release}: {status.reason}"
        where = f",title={bad.file} hunk {bad.hunk}" if bad else ""
        lines.append(f"::error file={file}{where}::{_escaped(text)}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _hunk(placement: Placement) -> dict[str, Any]:
    return {
        "file": placement.file,
        "hunk": placement.hunk,
        "line": placement.line,
        "state": placement.state,
        "offset": placement.offset,
        "expected": placement.expected or None,
        "found": placement.found or None,
    }
