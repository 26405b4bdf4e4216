"""Rebase a patch onto another release: commit it where it applies, and cherry-pick the commit.

`git am -3` needs blobs that no repository has. A commit on the nearest release on which a port
applies strictly gives git a common ancestor. The merge happens in a work tree of the store, in the
data directory, outside of any checkout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyllamakv.errors import NoPortApplies, PatchConflict, PatchError, RebaseConflict, UsageError
from pyllamakv.patching import (
    apply,
    base_choice,
    conflict_help,
    foreign_series,
    hunks,
    patch_export,
    port_choice,
    port_comparison,
    port_writer,
    rebase_session,
    requirements,
    trees,
    worktree,
)
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.definition import Port
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import git_command, lockfile, spec_resolver
from pyllamakv.source.files import write_bytes_atomic
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.definition import Definition
    from pyllamakv.patching.rebase_session import Session
    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

#: "applies": an existing port applies to the release; "empty": the target has the change already;
#: "clean": git merged it; "resolved": a person did; "skipped": left out; "conflict": waits for a
#: person; "blocked": it requires a patch that waits.
State = Literal["applies", "empty", "clean", "resolved", "skipped", "conflict", "blocked"]


@dataclass(frozen=True)
class Rebased:
    """The result for one patch: the written file, and its losses against the old port.

    ``base`` is the port that was rebased, and ``anchor`` the release on which it was committed.
    """

    id: str
    onto: str
    state: State
    base: str = ""
    anchor: str = ""
    path: Path | None = None
    comparison: port_comparison.PortComparison | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "patch": self.id,
            "onto": self.onto,
            "state": self.state,
            "base": self.base or None,
            "anchor": self.anchor or None,
            "path": str(self.path) if self.path else None,
            "change": self.comparison.change if self.comparison else None,
            "lost": [loss.as_json() for loss in self.comparison.lost] if self.comparison else [],
            "notes": list(self.notes),
        }


def rebase(
    ids: Sequence[str],
    onto: str,
    *,
    patches: Path | str | None = None,
    to: Path | None = None,
    force: bool = False,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Iterator[Rebased]:
    """Rebase patches onto a release, one after another; yield each result.

    Ports are written into the series (``patches``, else the shipped one) or as ``ID.patch`` into
    ``to``. With ``force``, a port is written even if an existing one applies. A patch with a
    conflict waits, and those that require it are blocked; the others are rebased. Then
    RebaseConflict is raised, of several conflicts with each. `resume` and `skip` continue with the
    ids that follow. Raises NoPortApplies if a patch requires another one that was not named.
    """
    store = store or open_store()
    waiting: list[RebaseConflict] = []
    blocked: list[str] = []
    for number, id_ in enumerate(ids):
        after = tuple(ids[number + 1 :])
        try:
            yield _start(id_, onto, after, patches, to, store, force=force, progress=progress)
        except RebaseConflict as error:
            waiting.append(error)
            blocked.append(id_)
            if len(ids) > 1:
                yield Rebased(id_, onto, "conflict", notes=(str(error).splitlines()[0],))
        except NoPortApplies as error:
            needs = port_choice.load_series(patches).definition(id_)
            on = [each for each in blocked if any(each in port.requires for port in needs.ports)]
            if not on:
                raise
            blocked.append(id_)
            reason = str(error).splitlines()[0]
            yield Rebased(id_, onto, "blocked", notes=(f"{reason}; it requires {', '.join(on)}",))
    if len(waiting) == 1:
        raise waiting[0]
    if waiting:
        texts = "\n".join(map(str, waiting))
        files = tuple(file for error in waiting for file in error.files)
        raise RebaseConflict(texts, waiting[0].folder, files)


def resume(id_: str, *, store: Store | None = None) -> Iterator[Rebased]:
    """Write the port of a rebase after its conflict was resolved, and continue.

    Raises RebaseConflict while a file is not merged; nothing is written then.
    """
    store = store or open_store()
    with store.lock(f"rebase-{id_}"):
        session = _waiting(store, id_)
        _refuse_unmerged(store, session)
        worktree.remember(session.folder(store))
        done = _finish(store, session, worktree.write_tree(session.folder(store)), "resolved")
        rebase_session.clear(store, id_)
    yield done
    yield from _behind(session, store)


def skip(id_: str, *, store: Store | None = None) -> Iterator[Rebased]:
    """Skip the patch of a rebase, and continue with the next ones."""
    store = store or open_store()
    with store.lock(f"rebase-{id_}"):
        session = _waiting(store, id_)
        rebase_session.clear(store, id_)
    yield Rebased(id_, session.onto, "skipped", session.base, session.picked_from)
    yield from _behind(session, store)


def abort(id_: str, *, store: Store | None = None) -> None:
    """Remove an unfinished rebase, or the remains of a killed process; ports do not change."""
    store = store or open_store()
    with store.lock(f"rebase-{id_}"):
        rebase_session.clear(store, id_)


def _start(
    id_: str,
    onto: str,
    then: tuple[str, ...],
    patches: Path | str | None,
    to: Path | None,
    store: Store,
    *,
    force: bool,
    progress: Progress | None,
) -> Rebased:
    series = port_choice.load_series(patches)
    definition = series.definition(id_)
    release = trees.ensure_fetched(store, spec_resolver.resolve(onto, series.lock), progress)
    if to is None:
        port_writer.check_writable(series, definition, release)
    with store.lock(f"rebase-{id_}"):
        there = rebase_session.load(store, id_)
        if there is not None and there.phase == "waiting":
            raise conflict_help.conflict_error(
                store, there, f"A rebase of {id_} onto {there.onto} is already in progress"
            )
        rebase_session.clear(store, id_)  # what a killed process left
        written = to / f"{id_}.patch" if to and not force else None
        if written and written.is_file() and Port.from_file(written, id_).base == release.key:
            note = f"{written} is for this release already; --force replaces it"
            return Rebased(id_, release.name, "applies", path=written, notes=(note,))
        found = None if force else _served(series, definition, release, store)
        if found is not None:
            note = f"port {found.base} applies unchanged; --force writes another port"
            return Rebased(id_, release.name, "applies", found.base, notes=(note,))
        found_at = base_choice.nearest(definition, series, release, store=store)
        kept = requirements.needed_on(series, found_at.port, release, store, to)
        try:
            commit, _ = apply.apply_requirements(
                series, requirements.patches(kept, to), release, store=store
            )
        except (PatchConflict, NoPortApplies) as error:
            names = ", ".join(kept)
            msg = f"{id_} requires {names}; rebase that onto {release.name} first.\n{error}"
            raise NoPortApplies(msg) from error
        session = rebase_session.Session(
            id=id_,
            onto=release.name if release.kind == "path" else release.key,
            era=release.era,
            stock=release.commit,
            parent=commit,
            picked_from=found_at.release.name,
            base=found_at.port.base,
            picked_commit=found_at.commit,
            requires=kept,
            patches=foreign_series.absolute(patches) if patches else None,
            to=str(to.resolve()) if to else None,
            remaining=then,
        ).write(store, phase="starting")
        store.update_ref(rebase_session.ref(id_), found_at.commit)
        if progress:
            progress(f"merging {id_} into {release.name}", 0, None)
        worktree.make(store, session.folder(store), commit)
        unmerged, known = worktree.cherry_pick(session.folder(store), found_at.commit)
        if unmerged:
            session = session.write(store, phase="waiting")
            raise conflict_help.conflict_error(
                store, session, f"{id_} does not merge into {release.name} automatically"
            )
        tree = git_command.git(session.folder(store), "write-tree")
        done = _finish(store, session, tree, "resolved" if known else "clean")
        if known:
            review = "the conflict was resolved as the same one before: review the port"
            done = replace(done, notes=(review, *done.notes))
        rebase_session.clear(store, id_)
    return done


def _finish(store: Store, session: Session, tree: str, state: State) -> Rebased:
    """Export the merged tree as a port, check that the port reproduces it, and write the port."""
    said = Rebased(session.id, session.onto, state, session.base, session.picked_from)
    before = store.tree_of(session.parent)
    if tree == before:
        note = f"{session.onto} already contains all changes: see `pyllamakv patch obsolete`"
        return replace(said, state="empty", notes=(note,))
    series = port_choice.load_series(session.patches)
    definition = series.definition(session.id)
    old = _old(store, session)
    text = replace(old, base=session.onto)
    data = patch_export.export_tree(store, session.parent, tree, definition, text)
    text = replace(text, patch=hunks.parse(data, f"{session.id}.patch"))
    draft = TreeOverlay(trees.StoreTree(store, before))
    draft.apply(text.patch, text.name)
    if trees.write(store, before, draft) != tree:
        raise PatchError(f"The port {text.name} does not reproduce the merged tree.")
    notes = requirements.dropped(definition, session)
    notes += port_comparison.deletions(old.patch, text.patch)
    if session.to:
        path = Path(session.to) / f"{session.id}.patch"
        write_bytes_atomic(path, data)
    else:
        stock = trees.StoreTree(store, store.tree_of(session.stock))
        path, more = port_writer.write_port(definition, text, session.era, stock, store)
        if series.folder and session.onto.startswith("git-"):
            lockfile.pin(series.folder, spec_resolver.resolve(session.onto, series.lock))
        notes += more
    return replace(said, path=path, comparison=port_comparison.compare(old, text), notes=notes)


def _old(store: Store, session: Session) -> Port:
    data = patch_export.format_patch(store, session.picked_commit)
    return Port(session.id, hunks.parse(data, session.id), session.base, requires=session.requires)


def _behind(session: Session, store: Store) -> Iterator[Rebased]:
    to = Path(session.to) if session.to else None
    yield from rebase(session.remaining, session.onto, patches=session.patches, to=to, store=store)


def _served(series: Series, definition: Definition, release: Release, store: Store) -> Port | None:
    """Return the port that applies strictly; patches that it requires may be carried."""
    carrier = Carrier(store, release, series)
    try:
        plan = port_choice.choose_for_release(
            release, [definition.id], series=series, store=store, carrier=carrier
        )
    except (PatchConflict, NoPortApplies):
        return None
    port = plan.ports[-1]
    return None if port.carried_from else port


def _waiting(store: Store, id_: str) -> Session:
    session = rebase_session.load(store, id_)
    if session is None or session.phase != "waiting":
        cut = session is not None or rebase_session.place(store, id_).is_dir()
        if cut:
            msg = f"The rebase of {id_} was interrupted; clear it with --abort and start again."
        else:
            msg = (
                f"No rebase of {id_} is in progress; start one with `pyllamakv patch rebase {id_} "
                f"--onto`."
            )
        raise UsageError(msg)
    if not session.folder(store).is_dir():
        raise UsageError(f"{session.folder(store)} is missing; clear the rebase with --abort.")
    return session


def _refuse_unmerged(store: Store, session: Session) -> None:
    folder = session.folder(store)
    marked = worktree.with_conflict_markers(folder, worktree.changed(folder, session.parent))
    left = [c for c in worktree.unmerged_files(folder) if c.kind != "content" and _open(folder, c)]
    if marked or left:
        raise conflict_help.conflict_error(store, session, "Some files are not merged yet", marked)


def _open(folder: Path, clash: worktree.UnmergedFile) -> bool:
    # The user deletes the file, or keeps it with `git add`.
    return (folder / clash.path).exists() == (clash.kind == "gone")
