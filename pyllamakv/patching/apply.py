"""Make the patched commit of a release: the same id on any machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyllamakv.patching import mail_header, port_choice, trees
from pyllamakv.patching.draft import Draft
from pyllamakv.source import gitting
from pyllamakv.source.store import Store, disk_room, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.definition import PatchText
    from pyllamakv.patching.port_choice import AppliedPort, Plan, Skipped
    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class Patched:
    """Name a patched release: its commit and tree in the store, and what went into it.

    ``digest`` is the sha256 over the changes in order (of nothing for stock); ``skipped`` is what
    the series has and this release does not take.
    """

    release: str
    commit: str
    tree: str
    digest: str
    patches: tuple[str, ...]
    steps: tuple[AppliedPort, ...] = field(default=(), repr=False)
    skipped: tuple[Skipped, ...] = ()

    @property
    def texts(self) -> tuple[PatchText, ...]:
        """Return the texts that were applied, in order."""
        return tuple(step.text for step in self.steps)


def apply(
    release: Release,
    names: Sequence[str | PatchText] | None = None,
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Patched:
    """Apply patches to a release and commit the result in the store.

    ``names`` as in `port_choice.plan_release`; an empty list is stock. Nothing is written when a
    patch does not apply: PatchConflict, or NoTextApplies when several texts were tried.
    """
    store = store or open_store()
    release = trees.present(store, release, progress)
    if names is not None and not names:
        return Patched(release.name, release.commit, store.tree_of(release), digest(()), ())
    plan = port_choice.plan_release(release, names, series=series, store=store)
    return write(store, release, plan)


def write(store: Store, release: Release, plan: Plan) -> Patched:
    """Commit a plan's texts, one commit each, on the release's own commit."""
    commit, tree = release.commit, store.tree_of(release)
    draft = Draft(trees.StoreTree(store, tree))
    for step in plan.steps:
        draft.apply(step.text.patch, step.text.name)
        tree = trees.write(store, store.tree_of(release), draft)
        commit = commit_text(store, tree, commit, step.text)
    patched = Patched(
        release=release.name,
        commit=commit,
        tree=tree,
        digest=digest(plan.texts),
        patches=tuple(text.id for text in plan.texts),
        steps=plan.steps,
        skipped=plan.skipped,
    )
    # a ref, so that no clean-up of the store ever takes the commit away
    store.publish(f"refs/patched/{commit}", commit)
    return patched


def ground(
    series: Series, requires: Sequence[str | PatchText], release: Release, *, store: Store
) -> tuple[str, str]:
    """Return commit and tree of a release with the patches that a text requires."""
    if not requires:
        return release.commit, store.tree_of(release)
    plan = port_choice.plan_release(release, requires, series=series, store=store)
    patched = write(store, release, plan)
    return patched.commit, patched.tree


def digest(texts: Sequence[PatchText]) -> str:
    """Return the sha256 over the changes of several texts, in order."""
    return hashlib.sha256("".join(f"{text.digest}\n" for text in texts).encode()).hexdigest()


def commit_text(store: Store, tree: str, parent: str, text: PatchText) -> str:
    """Commit a tree with the author, date and message of a text's header."""
    author, message = mail_header.commit_words(text)
    with disk_room(store.path):
        return gitting.git(store.path, "commit-tree", tree, "-p", parent, input=message, env=author)
