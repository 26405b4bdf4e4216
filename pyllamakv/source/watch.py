"""Look on the package indexes and git remotes for versions that no lock has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from pyllamakv.errors import FetchError, ToolMissing
from pyllamakv.source import lockfile, npm, spec_resolver
from pyllamakv.source.index import PackageIndex, is_version
from pyllamakv.source.package_sources import SOURCES, build_tag
from pyllamakv.source.pipconfig import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyllamakv.source.package_sources import PackageSource
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class NewVersion:
    """Describe a version that an index offers and no lock has."""

    #: The project on the index: ``xllamacpp``.
    source: str
    version: str
    #: What `fetch.add` and `pyllamakv upstream add` take: ``xllamacpp==2026.10.11549``.
    spec: str
    #: When it was uploaded, ISO 8601 in UTC; empty if the index does not say.
    date: str
    #: SHA-256 of its archive; None if the index does not say.
    sha256: str | None = None


@dataclass(frozen=True)
class NewVersions:
    """List the versions on all indexes that no lock has."""

    #: Versions that are newer than every shipped one of their source, newest upload first. Of a
    #: source without one: those that were uploaded after the newest shipped release.
    new: tuple[NewVersion, ...]
    #: Older versions that no lock has, newest upload first.
    unpinned: tuple[NewVersion, ...]
    #: Pinned packages that their index no longer has, or has with another hash. Unknown, and
    #: therefore empty, for a project of which a source did not answer.
    lost: tuple[str, ...]
    #: Error messages of sources that did not answer; their versions are not listed.
    unreachable: tuple[str, ...]
    #: Pinned git references, as ``git:URL@REF``, that have another commit now, or are gone.
    moved: tuple[str, ...] = ()


class _Offers(NamedTuple):
    """The versions on the index of one source."""

    #: The versions that are not yanked.
    versions: list[NewVersion]
    #: All versions, also yanked ones.
    there: set[str]
    #: The hashes of each version that is not yanked; None where the index states none.
    hashes: dict[str, set[str | None]]
    unreachable: list[str]


def new_versions() -> NewVersions:
    """Compare all package indexes, and the remotes of pinned git references, with the lock files.

    Raises FetchError if no index answers.
    """
    new: list[NewVersion] = []
    unpinned: list[NewVersion] = []
    lost: list[str] = []
    failed: list[str] = []
    answered = False
    for source in SOURCES:
        try:
            offers = _npm_offers(source) if source.kind == "npm" else _index_offers(source)
        except (FetchError, ToolMissing) as error:
            failed.append(f"{source.project}: {error}")
            continue
        answered = True
        failed += [f"{source.project}: {problem}" for problem in offers.unreachable]
        fresh, older, gone = _compare(source, offers)
        new += fresh
        unpinned += older
        # A source that did not answer may have them.
        lost += () if offers.unreachable else map(source.package, gone)
    if not answered:
        raise FetchError("; ".join(failed))
    moved = tuple(_moved(failed))
    return NewVersions(newest_first(new), newest_first(unpinned), tuple(lost), tuple(failed), moved)


def _moved(failed: list[str]) -> Iterator[str]:
    for release in lockfile.known().values():
        if release.kind == "git":
            try:
                if spec_resolver.remote_commit(release) != release.commit:
                    yield redacted(release.name)
            except FetchError as error:
                failed.append(str(error))


def _compare(
    source: PackageSource, offers: _Offers
) -> tuple[list[NewVersion], list[NewVersion], list[str]]:
    """Return new and older versions, oldest first, and the pinned ones that are lost."""
    known = lockfile.known()
    pinned = {name: each for each in known.values() if (name := _pinned(source, each))}
    # A user's additions do not count: an older version, whose fetch failed, stays new.
    shipped = lockfile.load(lockfile.shipped())
    names = (name for each in shipped if (name := _pinned(source, each)))
    newest = max(map(Version, names), default=None)
    date = max((each.date for each in shipped), default="")
    new: list[NewVersion] = []
    older: list[NewVersion] = []
    for each in sorted(offers.versions, key=lambda found: Version(found.version)):
        order = Version(each.version)
        # The same build of llama.cpp may be pinned from another source.
        same_build = source.kind == "xllamacpp" and build_tag(each.version) in known
        if each.version in pinned or same_build or (source.since and order < source.since):
            continue
        fresh = order > newest if newest is not None else each.date >= date
        (new if fresh else older).append(each)
    hashes = offers.hashes
    lost = [v for v, r in pinned.items() if v not in offers.there or not _has(hashes.get(v), r)]
    return new, older, lost


def _pinned(source: PackageSource, release: Release) -> str:
    """Return the version of a source that a release is of, or an empty text."""
    if release.kind != source.kind:
        return ""
    version = source.version_of(release.package or "") or release.name
    return version if is_version(version) else ""


def _index_offers(source: PackageSource, index: PackageIndex | None = None) -> _Offers:
    if index is None:
        with PackageIndex(project=source.project) as opened:
            return _index_offers(source, opened)
    files = index.sdists()
    if not files:
        msg = (
            f"no sdist of {source.project} is listed on {index.settings.sources}: check that it is "
            "a package index (`pip config list`)"
        )
        raise FetchError(msg)
    found: dict[str, NewVersion] = {}
    hashes: dict[str, set[str | None]] = {}
    for file in files:
        spec = source.spec(file.version)
        if file.yanked or not source.version_of(spec):
            continue
        fresh = NewVersion(source.project, file.version, spec, file.uploaded, file.sha256)
        kept = found.setdefault(file.version, fresh)
        if (not kept.date and fresh.date) or (kept.sha256 is None and fresh.sha256):
            found[file.version] = fresh
        hashes.setdefault(file.version, set()).add(file.sha256)
    there = {file.version for file in files}
    return _Offers(list(found.values()), there, hashes, list(index.unreachable))


def _npm_offers(source: PackageSource) -> _Offers:
    listed = {v: date for v, date in npm.versions().items() if source.version_of(source.spec(v))}
    found = [NewVersion(source.project, v, source.spec(v), date) for v, date in listed.items()]
    return _Offers(found, set(listed), {}, [])


def newest_first(found: Iterable[NewVersion]) -> tuple[NewVersion, ...]:
    """Return versions by their upload, the newest first; those without a date come last."""
    return tuple(sorted(found, key=lambda v: (v.date, Version(v.version)), reverse=True))


def _has(hashes: set[str | None] | None, release: Release) -> bool:
    # A yanked version can still be fetched, and neither an index nor a lock need state hashes.
    return not hashes or None in hashes or release.sha256 is None or release.sha256 in hashes
