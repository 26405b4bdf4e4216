"""Create the patched commit of a release: the same id on any machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyllamakv.errors import NoPortApplies
from pyllamakv.patching import mail_header, port_choice, trees
from pyllamakv.patching import series as series_module
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import git_command
from pyllamakv.source.store import Store, open_store, translate_disk_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.port_choice import AppliedPort, PortChoice, Skipped
    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class PatchedRelease:
    """A patched release: its commit and tree in the store, and the applied ports.

    ``digest`` is the sha256 of the changes in order (of nothing for stock). ``skipped`` has the
    patches of the series that do not apply to this release.
    """

    release: str
    commit: str
    tree: str
    digest: str
    patches: tuple[str, ...]
    steps: tuple[AppliedPort, ...] = field(default=(), repr=False)
    skipped: tuple[Skipped, ...] = ()

    @property
    def ports(self) -> tuple[Port, ...]:
        """Return the ports that were applied, in order."""
        return tuple(step.port for step in self.steps)

    @property
    def carried(self) -> dict[str, str]:
        """Return the base of the port that each carried patch was merged from, by id."""
        return {port.id: port.carried_from for port in self.ports if port.carried_from}

    def check_complete(self) -> None:
        """Raise NoPortApplies if a skipped patch is meant for the release."""
        failed = [skip for skip in self.skipped if skip.failed]
        if failed:
            reasons = "".join(f"\n  {skip.id}: {skip.reason}" for skip in failed)
            msg = (
                f"{len(failed)} patches of the series do not apply to {self.release}, nothing was "
                "written: rebase them, limit their `releases`, or name the patches to "
                f"apply.{reasons}"
            )
            raise NoPortApplies(msg, [error for skip in failed for error in skip.conflicts])


def apply(
    release: Release,
    names: Sequence[str | Port] | None = None,
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> PatchedRelease:
    """Apply patches to a release and commit the result in the store.

    ``names`` as in `port_choice.choose_for_release`; an empty list is stock. Nothing is written if
    a patch does not apply: PatchConflict, or NoPortApplies when several ports were tried.
    """
    store = store or open_store()
    release = trees.ensure_fetched(store, release, progress)
    if names is not None and not names:
        return PatchedRelease(release.name, release.commit, store.tree_of(release), digest(()), ())
    series = series_module.load() if series is None else series
    carrier = Carrier(store, release, series, progress=progress)
    plan = port_choice.choose_for_release(
        release, names, series=series, store=store, carrier=carrier
    )
    return write(store, release, plan)


def write(store: Store, release: Release, plan: PortChoice) -> PatchedRelease:
    """Commit a plan's ports, one commit each, on the release's own commit."""
    commit, tree = release.commit, store.tree_of(release)
    draft = TreeOverlay(trees.StoreTree(store, tree))
    for step in plan.steps:
        draft.apply(step.port.patch, step.port.name)
        tree = trees.write(store, store.tree_of(release), draft)
        commit = commit_port(store, tree, commit, step.port)
    patched = PatchedRelease(
        release=release.name,
        commit=commit,
        tree=tree,
        digest=digest(plan.ports),
        patches=tuple(port.id for port in plan.ports),
        steps=plan.steps,
        skipped=plan.skipped,
    )
    # The ref protects the commit from git's garbage collection.
    store.update_ref(f"refs/patched/{commit}", commit)
    return patched


def apply_requirements(
    series: Series, requires: Sequence[str | Port], release: Release, *, store: Store
) -> tuple[str, str]:
    """Return commit and tree of a release with the patches that a port requires.

    They are carried if need be.
    """
    if not requires:
        return release.commit, store.tree_of(release)
    plan = port_choice.choose_for_release(
        release, requires, series=series, store=store, carrier=Carrier(store, release, series)
    )
    patched = write(store, release, plan)
    return patched.commit, patched.tree


def digest(ports: Sequence[Port]) -> str:
    """Return the sha256 over the changes of several ports, in order."""
    return hashlib.sha256("".join(f"{port.digest}\n" for port in ports).encode()).hexdigest()


def commit_port(store: Store, tree: str, parent: str, port: Port) -> str:
    """Commit a tree with the author, date and message of a port's header."""
    author, message = mail_header.author_and_message(port)
    with translate_disk_errors(store.path):
        return git_command.git(
            store.path, "commit-tree", tree, "-p", parent, input=message, env=author
        )
