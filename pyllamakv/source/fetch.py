"""Fetch releases into the store: from a package index, npm, git, or a local file."""

from __future__ import annotations

import difflib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import (
    FetchError,
    GitError,
    HashMismatch,
    NotFetched,
    UnknownRelease,
    UsageError,
)
from pyllamakv.home import home
from pyllamakv.source import architectures, era, lockfile, npm, spec_resolver, xllamacpp
from pyllamakv.source import sdist_import as archives
from pyllamakv.source.download import download, file_hash
from pyllamakv.source.git_command import TIMED_OUT
from pyllamakv.source.index import IndexFile, PackageIndex
from pyllamakv.source.package_sources import find_archive, find_package, free_name
from pyllamakv.source.progress import no_progress
from pyllamakv.source.releases import Release, is_safe_name
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.source.package_sources import PackageSource
    from pyllamakv.source.progress import Progress


def downloads() -> Path:
    """Return the directory of archives during a fetch."""
    return home() / "downloads"


def fetch(release: Release, *, progress: Progress | None = None, keep: bool = False) -> Release:
    """Fetch a release's objects into the store, check its hashes, and return it.

    Existing objects are not fetched again. With ``keep``, the archive stays in `downloads`. Raises
    FetchError, HashMismatch, ArchiveError, DiskFull or ToolMissing, with the store unchanged, and
    NotFetched if the lock file has no archive of the release.
    """
    store = open_store()
    if store.has(release):
        return release
    with store.lock(f"fetch-{release.key}"):
        if store.has(release):
            return release
        if release.kind == "path":
            found = spec_resolver.from_folder(release.name)
            return _same(release, found)
        if release.kind == "git":
            return _same(release, _fetch_git(release))
        file = archive(release, progress)
        _import(store, release, file, progress)
        if not keep:
            file.unlink(missing_ok=True)
    return release


def ensure(spec: str, *, lock: Path | None = None, progress: Progress | None = None) -> Release:
    """Return the release that a spec means, fetched; a version that is new is added first.

    ``lock`` is the lock file of a series.
    """
    try:
        release = resolve(spec, lock)
    except UnknownRelease:
        if not find_package(spec.strip()):
            raise
        return add(spec, progress=progress)
    return fetch(release, progress=progress)


def fetch_unlisted(version: str) -> Release:
    """Return a version that no lock has, fetched, without adding it to one.

    A version that an earlier call fetched is not downloaded again.
    """
    store = open_store()
    with store.lock(f"add-{version}"):
        commit = store.ref(f"refs/upstream/{version}") if is_safe_name(version) else None
        if commit is None:
            if not (bring := _brings(version)):
                raise UnknownRelease(f"{version!r} is not a version", name=version, suggestions=())
            return bring(None, keep=False)
        tree = store.tree_of(commit)
        return Release(
            name=version,
            kind="sdist",
            commit=commit,
            tree=tree,
            era=era.detect(store, tree),
            date=store.date(commit),
        )


def add(
    what: str, *, progress: Progress | None = None, pin: Path | None = None, keep: bool = False
) -> Release:
    """Add a release that is not pinned, and fetch it.

    ``what`` is a version of llama-cpp-python, ``node-llama-cpp@VERSION``, ``xllamacpp==VERSION``,
    an archive file, ``git:URL@REF`` or ``path:DIR``. The release is written to the user's lock
    file, or to the lock file ``pin`` and the table of architectures beside it. The archive of a
    pinned release must match its lock file. A git reference is resolved again.
    """
    what = what.strip()
    if what.startswith("path:"):
        return spec_resolver.from_folder(what)
    if what.startswith("git:"):
        release = spec_resolver.pin_git(what)
    elif (file := spec_resolver.existing_path(what)) and file.is_file():
        release = _add_file(file, progress)
    elif bring := _brings(what):
        # The archive is deleted at the end. Until the release is recorded, no other process may
        # read the archive or look for the release.
        with open_store().lock(f"add-{what}"):
            release = bring(progress, keep=keep)
            _note(release, pin)
        return release
    else:
        msg = (
            f"{what!r} is neither a file nor a version; expected are a version of "
            "llama-cpp-python, node-llama-cpp@VERSION, xllamacpp==VERSION, an archive, "
            "git:URL@REF or path:DIR"
        )
        raise UsageError(msg)
    _note(release, pin)
    return release


def _brings(what: str) -> Callable[..., Release] | None:
    found = find_package(what)
    return partial(_add_version, *found) if found else None


def _note(release: Release, pin: Path | None) -> None:
    if pin is not None:
        lockfile.save(pin, [release])
        architectures.add(pin, open_store(), release)
    elif lockfile.known().get(release.name) != release:
        lockfile.save(lockfile.added(), [release])


# --- from the index and npm -------------------------------------------------------------------


def archive(release: Release, progress: Progress | None = None) -> Path:
    """Return the archive of a release in `downloads`, downloaded if need be and checked."""
    if not release.archive or not release.package:
        msg = f"the lock file has no archive for {release.name}, so it cannot be fetched"
        raise NotFetched(msg)
    place = downloads() / release.archive
    if place.is_file() and file_hash(place) == release.sha256:
        return place
    if release.kind == "npm":
        (progress or no_progress)(f"npm pack {release.package}", 0, None)
        version = release.package.rpartition("@")[2]
        return npm.pack(version, place.parent, sha256=release.sha256)
    project, _, version = release.package.partition("==")
    with PackageIndex(project=project) as index:
        offered = _offered(index, version, release.sha256)
        download(index.session, offered.url, place, sha256=release.sha256, progress=progress)
    return place


def _offered(index: PackageIndex, version: str, sha256: str | None) -> IndexFile:
    """Return the index's file of a version; one with the expected hash is preferred."""
    everything = index.sdists()
    files = [file for file in everything if file.version == version]
    if not files:
        newest = f"; the newest there is {everything[-1].version}" if everything else ""
        msg = f"{index.settings.sources} has no sdist of {index.project} {version}{newest}"
        if index.unreachable:
            msg += f"; not every source answered: {'; '.join(index.unreachable)}"
            raise FetchError(msg)
        if sha256:
            msg += "; give the archive to `pyllamakv upstream add FILE`"
            raise FetchError(msg)
        close = difflib.get_close_matches(version, {file.version for file in everything})
        raise UnknownRelease(msg, name=version, suggestions=close)
    wrong = [file for file in files if sha256 and file.sha256 not in (None, sha256)]
    if len(wrong) == len(files):
        msg = (
            f"the index offers {wrong[0].name} with SHA-256 {wrong[0].sha256}, but the "
            f"lock file expects {sha256}; nothing was downloaded"
        )
        raise HashMismatch(msg, sha256 or "", wrong[0].sha256 or "")
    return next((f for f in files if f.sha256 == sha256), next(f for f in files if f not in wrong))


def _import(store: Store, release: Release, file: Path, progress: Progress | None) -> None:
    (progress or no_progress)(f"import {release.name}", 0, None)
    found = find_package(release.package or "")
    if not found:
        msg = f"the lock file names no known package for {release.name}: edit or remove its entry"
        raise FetchError(msg)
    _import_archive(store, *found, file, commit=release.commit, tree=release.tree)
    store.update_ref(f"refs/upstream/{release.key}", release.commit)


def _import_archive(
    store: Store,
    source: PackageSource,
    version: str,
    file: Path,
    *,
    commit: str = "",
    tree: str = "",
) -> tuple[str, str, str]:
    """Import an archive; return its commit, tree, and upstream's tag, which may be empty."""
    if source.kind == "npm":
        return npm.import_package(store, file, commit=commit, tree=tree)
    if source.kind == "xllamacpp":
        return xllamacpp.import_package(store, file, version, commit=commit, tree=tree)
    return *archives.import_sdist(store, file, commit=commit, tree=tree), ""


def _fetch_git(release: Release) -> Release:
    url, _ = spec_resolver.split_git(release.name)
    wanted = release.commit
    try:
        return spec_resolver.fetch_git(f"git:{url}@{wanted}", commit=wanted)
    except FetchError as error:
        if isinstance(error.__cause__, GitError) and error.__cause__.code == TIMED_OUT:
            raise  # the lock of the fetch would be held for another timeout
        # Some servers do not serve a commit by id; its reference may still point to it.
        return spec_resolver.fetch_git(release.name, commit=wanted)


def _same(wanted: Release, found: Release) -> Release:
    if found.commit != wanted.commit:
        msg = f"{wanted.name} is now {found.commit}, was {wanted.commit}; add it again"
        raise HashMismatch(msg, wanted.commit, found.commit)
    return wanted


# --- releases that no lock has --------------------------------------------------------------------


def _add_version(
    source: PackageSource, version: str, progress: Progress | None, *, keep: bool
) -> Release:
    package = source.package(version)
    names = (source.spec(version), package)
    known = [r for r in lockfile.known().values() if {r.name, r.package} & set(names)]
    if known:
        return fetch(known[0], progress=progress, keep=keep)
    if source.kind == "npm":
        (progress or no_progress)(f"npm pack {package}", 0, None)
        place = npm.pack(version, downloads(), sha256=None)
    else:
        with PackageIndex(project=source.project) as index:
            offered = _offered(index, version, None)
            place = downloads() / offered.name
            download(index.session, offered.url, place, sha256=offered.sha256, progress=progress)
    release = _add_file(place, progress)
    if not keep:
        place.unlink(missing_ok=True)
    return release


def _add_file(file: Path, progress: Progress | None) -> Release:
    found = find_archive(file.name)
    if not found:
        msg = (
            f"{file.name} is neither llama_cpp_python-VERSION.tar.gz, node-llama-cpp-VERSION.tgz "
            "nor xllamacpp-VERSION.tar.gz; a git bundle is given as git:FILE@REF"
        )
        raise UsageError(msg)
    store = open_store()
    sha256 = file_hash(file)
    known = [r for r in lockfile.known().values() if r.archive == file.name]
    if known:
        if known[0].sha256 != sha256:
            msg = f"{file} has SHA-256 {sha256}, but the lock file expects {known[0].sha256}"
            raise HashMismatch(msg, known[0].sha256 or "", sha256)
        if not store.has(known[0]):
            _import(store, known[0], file, progress)
        return known[0]
    source, version = found
    if not is_safe_name(free_name(source, version, "", ())):
        msg = f"{file.name} is not usable as the name of a release"
        raise UsageError(msg)
    (progress or no_progress)(f"import {file.name}", 0, None)
    commit, tree, tag = _import_archive(store, source, version, file)
    release = Release(
        name=free_name(source, version, tag, lockfile.known()),
        kind=source.kind,
        commit=commit,
        tree=tree,
        era=era.detect(store, tree),
        date=store.date(commit),
        archive=file.name,
        sha256=sha256,
        package=source.package(version),
    )
    store.update_ref(f"refs/upstream/{release.key}", commit)
    return release
