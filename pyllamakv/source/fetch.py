"""Fetch releases into the store: from the package index, npm, git, or a local file."""

from __future__ import annotations

import difflib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import FetchError, HashMismatch, UnknownRelease, UsageError
from pyllamakv.home import home
from pyllamakv.source import era, lockfile, npm, spec_resolver
from pyllamakv.source import progress as telling
from pyllamakv.source import sdist_import as archives
from pyllamakv.source.download import download, file_hash
from pyllamakv.source.index import PROJECT, IndexFile, PackageIndex
from pyllamakv.source.releases import Release, is_safe_name
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.source.progress import Progress

_SDIST = re.compile(r"llama[-_]cpp[-_]python-(?P<version>[0-9][\w.+-]*)\.tar\.gz")
_TARBALL = re.compile(r"node-llama-cpp-(?P<version>[0-9][\w.+-]*)\.tgz")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)+[\w.+-]*")
#: The longest name of a version that is asked for: files are named after it.
_LONGEST = 100
_NPM_SPEC = re.compile(r"node-llama-cpp@(?P<version>[0-9][\w.+-]*)")


def downloads() -> Path:
    """Return the directory of archives during a fetch."""
    return home() / "downloads"


def fetch(release: Release, *, progress: Progress | None = None, keep: bool = False) -> Release:
    """Fetch a release's objects into the store, check its hashes, and return it.

    Existing objects are not fetched again. With ``keep``, the archive stays in `downloads`. Raises
    FetchError, HashMismatch, ArchiveError, DiskFull or ToolMissing, with the store unchanged.
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


def ensure(spec: str, *, progress: Progress | None = None) -> Release:
    """Return the release that a spec means, fetched; a version that is new is added first."""
    try:
        release = resolve(spec)
    except UnknownRelease:
        if not _VERSION.fullmatch(spec.strip()):
            raise
        return add(spec, progress=progress)
    return fetch(release, progress=progress)


def fetch_unlisted(version: str, *, progress: Progress | None = None) -> Release:
    """Return a version that no lock has, fetched, without adding it to one.

    One that an earlier call fetched is in the store, and not downloaded again.
    """
    store = open_store()
    with store.lock(f"add-{version}"):
        commit = store.ref(f"refs/upstream/{version}") if is_safe_name(version) else None
        if commit is None:
            if not (bring := _brings(version)):
                raise UnknownRelease(f"{version!r} is not a version", name=version, suggestions=())
            return bring(progress, keep=False)
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

    ``what`` is a version, ``node-llama-cpp@VERSION``, an archive file, ``git:URL@REF`` or
    ``path:DIR``. The release is written to the user's lock file, or to ``pin``. The archive of a
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
            f"{what!r} is neither a file nor a version; expected are a version as on the package "
            "index, node-llama-cpp@VERSION, an archive, git:URL@REF or path:DIR"
        )
        raise UsageError(msg)
    _note(release, pin)
    return release


def _brings(what: str) -> Callable[..., Release] | None:
    if len(what) > _LONGEST:
        return None
    if match := _NPM_SPEC.fullmatch(what):
        return partial(_add_npm, match["version"])
    return partial(_add_version, what) if _VERSION.fullmatch(what) else None


def _note(release: Release, pin: Path | None) -> None:
    if pin is not None:
        lockfile.save(pin, [release])
    elif lockfile.known().get(release.name) != release:
        lockfile.save(lockfile.added(), [release])


# --- from the index and npm -------------------------------------------------------------------


def archive(release: Release, progress: Progress | None = None) -> Path:
    """Return the archive of a release in `downloads`, downloaded if need be and checked."""
    if not release.archive or not release.package:
        msg = f"the lock file has no archive for {release.name}, so it cannot be fetched"
        raise FetchError(msg)
    place = downloads() / release.archive
    if place.is_file() and file_hash(place) == release.sha256:
        return place
    if release.kind == "npm":
        (progress or telling.no_progress)(f"npm pack {release.package}", 0, None)
        version = release.package.rpartition("@")[2]
        return npm.pack(version, place.parent, sha256=release.sha256)
    version = release.package.rpartition("==")[2]
    with PackageIndex() as index:
        offered = _offered(index, version, release.sha256)
        download(index.session, offered.url, place, sha256=release.sha256, progress=progress)
    return place


def _offered(index: PackageIndex, version: str, sha256: str | None) -> IndexFile:
    """Return the index's file of a version, one with the wanted hash before others."""
    everything = index.sdists()
    files = [file for file in everything if file.version == version]
    if not files:
        newest = f"; the newest there is {everything[-1].version}" if everything else ""
        msg = f"{index.settings.sources} has no sdist of {PROJECT} {version}{newest}"
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
    (progress or telling.no_progress)(f"import {release.name}", 0, None)
    if release.kind == "npm":
        npm.import_package(store, file, commit=release.commit, tree=release.tree)
    else:
        archives.import_sdist(store, file, commit=release.commit, tree=release.tree)
    store.update_ref(f"refs/upstream/{release.key}", release.commit)


def _fetch_git(release: Release) -> Release:
    url, _ = spec_resolver.split_git(release.name)
    try:
        return spec_resolver.fetch_git(f"git:{url}@{release.commit}")
    except FetchError:
        # Some servers do not serve a commit by id; its reference may still point to it.
        return spec_resolver.fetch_git(release.name)


def _same(wanted: Release, found: Release) -> Release:
    if found.commit != wanted.commit:
        msg = f"{wanted.name} is now {found.commit}, was {wanted.commit}; add it again"
        raise HashMismatch(msg, wanted.commit, found.commit)
    return wanted


# --- what no lock has yet ---------------------------------------------------------------------


def _add_version(version: str, progress: Progress | None, *, keep: bool) -> Release:
    known = lockfile.known().get(version)
    if known is not None:
        return fetch(known, progress=progress, keep=keep)
    with PackageIndex() as index:
        offered = _offered(index, version, None)
        place = downloads() / offered.name
        download(index.session, offered.url, place, sha256=offered.sha256, progress=progress)
    release = _add_file(place, progress)
    if not keep:
        place.unlink(missing_ok=True)
    return release


def _add_npm(version: str, progress: Progress | None, *, keep: bool) -> Release:
    package = f"{npm.PROJECT}@{version}"
    known = [r for r in lockfile.known().values() if r.package == package]
    if known:
        return fetch(known[0], progress=progress, keep=keep)
    (progress or telling.no_progress)(f"npm pack {package}", 0, None)
    place = npm.pack(version, downloads(), sha256=None)
    release = _add_file(place, progress)
    if not keep:
        place.unlink(missing_ok=True)
    return release


def _add_file(file: Path, progress: Progress | None) -> Release:
    sdist, tarball = _SDIST.fullmatch(file.name), _TARBALL.fullmatch(file.name)
    if not sdist and not tarball:
        msg = (
            f"{file.name} is neither llama_cpp_python-VERSION.tar.gz nor node-llama-cpp-VERSION"
            ".tgz; a git bundle is given as git:FILE@REF"
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
    name = sdist["version"] if sdist else file.name.removesuffix(".tgz")
    if not is_safe_name(name):
        msg = f"{file.name} is not usable as the name of a release"
        raise UsageError(msg)
    (progress or telling.no_progress)(f"import {file.name}", 0, None)
    if sdist:
        package = f"{PROJECT}=={name}"
        commit, tree = archives.import_sdist(store, file)
    elif tarball:
        package = f"{npm.PROJECT}@{tarball['version']}"
        commit, tree, tag = npm.import_package(store, file)
        name = tag or name
    release = Release(
        name=name,
        kind="sdist" if sdist else "npm",
        commit=commit,
        tree=tree,
        era=era.detect(store, tree),
        date=store.date(commit),
        archive=file.name,
        sha256=sha256,
        package=package,
    )
    store.update_ref(f"refs/upstream/{release.key}", commit)
    return release
