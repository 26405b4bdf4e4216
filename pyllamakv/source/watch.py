"""Look on the package index for versions that no lock has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from pyllamakv.source import lockfile
from pyllamakv.source.index import PackageIndex

if TYPE_CHECKING:
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class IndexChanges:
    """List versions on the index that are not pinned."""

    #: Versions that are newer than every pinned one, to be verified next, oldest first.
    new: tuple[str, ...]
    #: Older versions that no lock has, oldest first.
    unpinned: tuple[str, ...]
    #: Versions in the locks that the index has no more, or has under another hash.
    lost: tuple[str, ...]


def compare_with_index(index: PackageIndex | None = None) -> IndexChanges:
    """Compare the index with the lock files. Raises FetchError if no source responds."""
    if index is None:
        with PackageIndex() as opened:
            return compare_with_index(opened)
    known = {
        r.name: r for r in lockfile.known().values() if r.kind == "sdist" and _is_version(r.name)
    }
    offered = index.sdists()
    hashes: dict[str, set[str | None]] = {}
    for file in offered:
        if not file.yanked:
            hashes.setdefault(file.version, set()).add(file.sha256)
    newest = max((Version(name) for name in known), default=None)
    ordered = sorted(set(hashes) - set(known), key=Version)
    new = tuple(v for v in ordered if newest is None or Version(v) > newest)
    kept = {file.version for file in offered}
    lost = [n for n, r in known.items() if n not in kept or not _offers(hashes.get(n), r)]
    return IndexChanges(new, tuple(v for v in ordered if v not in new), tuple(lost))


def _offers(hashes: set[str | None] | None, release: Release) -> bool:
    # A yanked version can still be fetched, and an index need not state hashes.
    return not hashes or None in hashes or release.sha256 in hashes


def _is_version(name: str) -> bool:
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True
