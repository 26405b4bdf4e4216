"""Chain the releases into one history of commits for git's own tools.

Each release is a commit of upstream's tree on top of the release before it. `git bisect`,
`git log -S` and `git blame` then work across all of them, although every archive brings but one
commit. The ids depend only on which releases are in the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.errors import SourceError
from pyllamakv.source import git_command, lockfile
from pyllamakv.source.releases import ARCHIVE_KINDS, Release

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.source.store import Store

CHAIN_REFS = "refs/line/"


class ChainLink(NamedTuple):
    """A release, and the synthetic commit that represents it."""

    release: Release
    commit: str


def chain(store: Store, releases: Iterable[Release] | None = None) -> list[ChainLink]:
    """Create the release chain, ordered by date, and return it; refs are ``refs/line/NAME``.

    Without ``releases`` it holds every release from an archive that the store has. Refs of
    releases that are no longer in the chain are removed.
    """
    if releases is None:
        known = lockfile.known().values()
        releases = [r for r in known if r.kind in ARCHIVE_KINDS and store.has(r)]
    line: list[ChainLink] = []
    for release in sorted(releases, key=lambda r: r.order):
        message = f"{release.name}\n\nEra: {release.era}\nUpstream-commit: {release.commit}"
        parents = [line[-1].commit] if line else []
        tree = store.tree_of(release)
        line.append(ChainLink(release, store.commit_tree(tree, parents, message, release.date)))
    # `git bisect` requires an existing HEAD; the store's HEAD names this branch.
    wanted: dict[str, str] = {"refs/heads/main": line[-1].commit} if line else {}
    wanted |= {CHAIN_REFS + link.release.key: link.commit for link in line}
    there = store.refs(CHAIN_REFS) | store.refs("refs/heads/main")
    for name, commit in wanted.items():
        if there.get(name) != commit:
            store.update_ref(name, commit)
    for name in sorted(set(there) - set(wanted)):
        store.delete_ref(name)
    return line


def pickaxe(
    store: Store, text: str, paths: Sequence[str] = (), *, line: Sequence[ChainLink] | None = None
) -> list[Release]:
    """Return the releases in which the number of occurrences of ``text`` changed, oldest first.

    ``paths`` limits the search to these files or folders. Raises SourceError for an empty line.
    """
    links = list(line) if line is not None else chain(store)
    if not links:
        msg = "no release has been fetched; run `pyllamakv upstream fetch` first"
        raise SourceError(msg)
    words = ["log", "--format=%H", "--reverse", "--full-history", f"-S{text}", links[-1].commit]
    out = git_command.git(store.path, *words, "--", *paths)
    names = {link.commit: link.release for link in links}
    return [names[commit] for commit in out.split() if commit in names]
