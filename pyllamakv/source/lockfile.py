"""Read and write the lock file: the known releases and their hashes.

The shipped lock file is ``vendor/upstream.lock.toml``. Releases that a user adds are stored in a
file of the same format in the data directory, so that an installed package is never modified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_args

from pyllamakv.errors import LockFileError
from pyllamakv.home import data, home
from pyllamakv.source.files import locked, write_text_atomic
from pyllamakv.source.releases import ARCHIVE_KINDS, Kind, Release, is_safe_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import tomlkit

_VERSION = 1
_HEAD = (
    "Upstream releases, ordered by the date of their commit. Written by `pyllamakv upstream add`;\n"
    "comments are kept. `sha256` pins the archive, `commit` and `tree` what git must find in it."
)
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
#: Parsed releases of each file, with the state of the file when it was read.
_KEPT: dict[Path, tuple[tuple[int, ...], list[Release]]] = {}
#: The lock file in the directory of a series: the releases of its ports that no other lock has.
SERIES_LOCK = "upstream.lock.toml"
_ORDER = [f.name for f in fields(Release)]
_REQUIRED = ("name", "kind", "commit", "tree", "era", "date")


def shipped() -> Path:
    """Return the path of the lock that ships with the package."""
    return data("vendor/upstream.lock.toml")


def added() -> Path:
    """Return the path of the user's lock file."""
    return home() / "added.lock.toml"


def known() -> dict[str, Release]:
    """Return all releases by name, ordered by date.

    Of several releases of one name, that of the shipped lock is returned, else the user's.
    """
    found = {release.name: release for file in (added(), shipped()) for release in load(file)}
    return {release.name: release for release in sorted(found.values(), key=lambda r: r.order)}


def bases(lock: Path | None = None) -> dict[str, Release]:
    """Return all releases by name and by key: a port for a git commit is named by its key.

    ``lock`` is the lock file of a series, whose releases are included.
    """
    found = pins(lock) | known()
    return {release.key: release for release in found.values()} | found


def pins(lock: Path | None) -> dict[str, Release]:
    """Return the git commits that the lock file of a series pins, by name.

    Raises LockFileError for another entry than `pin` writes: a series comes from anywhere, and its
    lock must not state what a release of a package index or a branch is.
    """
    found = {release.name: release for release in load(lock)} if lock else {}
    for name, release in found.items():
        if release.kind != "git" or not re.fullmatch(rf"git:.+@{release.commit}", name):
            msg = (
                f"{lock}: release {name!r} is not git:URL@{release.commit}: the lock of a series "
                "pins git commits by their ids; remove the entry"
            )
            raise LockFileError(msg)
    return found


def pin(folder: Path, release: Release) -> None:
    """Write the git commit that a port is for to the lock of its series.

    A reference is pinned as its commit, because it may move. Releases of package indexes need no
    pin: their name identifies them.
    """
    if release.kind == "git":
        url = release.name.removeprefix("git:").rpartition("@")[0] or release.url
        save(folder / SERIES_LOCK, [replace(release, name=f"git:{url}@{release.commit}")])


def load(path: Path) -> list[Release]:
    """Return the releases of a lock file, ordered by date; none when there is no such file.

    A file that did not change is parsed once. Raises LockFileError, naming the file and the entry,
    when it cannot be understood.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return _parsed(path)
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    kept = _KEPT.get(path)
    if kept is None or kept[0] != stamp:
        kept = _KEPT[path] = (stamp, _parsed(path))
    return list(kept[1])


def _parsed(path: Path) -> list[Release]:
    releases = [_release(path, table) for table in _document(path).get("release", [])]
    names = [release.name for release in releases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        msg = f"{path} names release {twice[0]} twice; remove one entry"
        raise LockFileError(msg)
    return sorted(releases, key=lambda release: release.order)


def save(path: Path, releases: Iterable[Release]) -> None:
    """Add releases to a lock file, or replace those of the same name; keep its comments."""
    import tomlkit

    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(home() / "locks" / f"{path.name}.lock"):
        document = _document(path)
        if "version" not in document:
            for line in _HEAD.splitlines():
                document.add(tomlkit.comment(line))
            document.add("version", tomlkit.item(_VERSION))
            document.add(tomlkit.nl())
        tables = document.get("release")
        if tables is None:
            tables = tomlkit.aot()
            document.add("release", tables)
        for release in releases:
            _put(path, tables, release)
        write_text_atomic(path, tomlkit.dumps(document))


def _document(path: Path) -> tomlkit.TOMLDocument:
    # A completion imports this module, and tomlkit is slow to import.
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return tomlkit.document()
    except (OSError, ValueError, TOMLKitError, RecursionError) as error:
        msg = f"cannot read the lock {path}: {error}"
        raise LockFileError(msg) from error
    version = document.get("version")
    if version != _VERSION:
        # TOML can hold numbers of more digits than Python writes.
        known = version is None or (isinstance(version, int) and 0 <= version < 1 << 32)
        found = f"version {version}" if known else "an invalid version"
        msg = f"{path} has {found}; this program reads version {_VERSION}"
        raise LockFileError(msg)
    tables = document.get("release", [])
    if not isinstance(tables, list):
        msg = f"{path}: `release` must be a list of tables, each under [[release]]"
        raise LockFileError(msg)
    return document


def _release(path: Path, table: Any) -> Release:
    if not isinstance(table, Mapping):
        msg = f"{path}: `release` must be a list of tables, each under [[release]], found {table!r}"
        raise LockFileError(msg)
    facts = {key: str(value) for key, value in table.items() if isinstance(value, str)}
    name = facts.get("name", "?")
    others = sorted(set(table) - set(facts))
    unknown = sorted(set(table) - set(_ORDER))
    missing = [key for key in _REQUIRED if not facts.get(key)]
    problem = ""
    if unknown:
        problem = f"has an unknown key `{unknown[0]}`"
    elif others:
        problem = f"has a `{others[0]}` that is not a text"
    elif missing:
        problem = f"lacks `{missing[0]}`"
    elif facts["kind"] not in get_args(Kind):
        problem = f"has the unknown kind {facts['kind']!r}"
    elif not _HEX40.fullmatch(facts["commit"]) or not _HEX40.fullmatch(facts["tree"]):
        problem = "has a commit or tree that is not 40 hexadecimal digits"
    elif "sha256" in facts and not _HEX64.fullmatch(facts["sha256"]):
        problem = "has a sha256 that is not 64 hexadecimal digits"
    elif "archive" in facts and not is_safe_name(facts["archive"]):
        problem = "has an archive name that is not a file name"
    elif facts["kind"] in ARCHIVE_KINDS and not is_safe_name(name):
        problem = "has a name that is not safe in file names"
    if problem:
        msg = f"{path}: release {name!r} {problem}"
        raise LockFileError(msg)
    return Release(**facts)  # type: ignore[arg-type]


def _put(path: Path, tables: Any, release: Release) -> None:
    facts = {key: getattr(release, key) for key in _ORDER if getattr(release, key) is not None}
    for table in tables:
        if table.get("name") == release.name:
            for key in [key for key in table if key not in facts]:
                del table[key]
            for key, value in facts.items():
                if table.get(key) != value:
                    table[key] = value
            return
    import tomlkit

    fresh = tomlkit.table()
    for key, value in facts.items():
        fresh.add(key, value)
    fresh.add(tomlkit.nl())
    later = [i for i, t in enumerate(tables) if _release(path, t).order > release.order]
    tables.insert(later[0] if later else len(tables), fresh)
