"""Check a release in the store against what the lock says about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import GitError, SourceError
from pyllamakv.source import era, gitting
from pyllamakv.source.export import blob_id

if TYPE_CHECKING:
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: Contents of this many files are in memory at once.
_BATCH = 256


def problems(store: Store, release: Release) -> list[str]:
    """Return what is wrong with a release in the store; nothing when all is well.

    Every object of its tree is read and hashed again by git, so damage on the disk shows too.
    """
    found = store.ref(f"refs/upstream/{release.key}")
    if found is None:
        return ["not fetched"]
    if found != release.commit:
        return [f"the store holds commit {found}, the lock says {release.commit}"]
    try:
        tree = store.tree_of(release)
        blobs = sorted({entry.blob for entry in store.entries(tree)})
        gitting.git(store.path, "rev-list", "--objects", "--quiet", tree)
        damaged = _damaged(store, blobs)
    except (GitError, SourceError) as error:
        return [f"objects are missing or damaged: {error}"]
    said = []
    if tree != release.tree:
        said.append(f"the store holds tree {tree}, the lock says {release.tree}")
    if damaged:
        said.append(f"object {damaged[0]} is damaged ({len(damaged)} in all)")
    now = era.detect(store, tree)
    if now != release.era:
        said.append(f"its files look like era {now}, the lock says {release.era}")
    return said


def _damaged(store: Store, blobs: list[str]) -> list[str]:
    bad = []
    for start in range(0, len(blobs), _BATCH):
        batch = blobs[start : start + _BATCH]
        found = store.blobs(batch)
        bad += [name for name, data in zip(batch, found, strict=True) if blob_id(data) != name]
    return bad
