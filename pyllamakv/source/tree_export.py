"""Write a tree of the store into a directory, and compare the two.

Only files with different content are written, because build directories rely on modification times.
During an export, the stamp of the directory marks it as incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import GitError, SourceError, UsageError
from pyllamakv.source import tree_limits
from pyllamakv.source.files import translate_disk_errors, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store, TreeEntry

#: Through 0.3.9, upstream's CMake files write this file into the source tree.
GENERATED_FILES = ("common/build-info.cpp",)

#: The stamp is inside the directory, so that it is moved and removed with it.
STAMP = ".pyllamakv-tree"

#: Temporary names of a file and of the stamp. Both are in the root directory, where no tree may
#: have them, so that they do not limit the length of names in the tree.
_PART = ".pyllamakv-part"
_STAMP_PART = f".{STAMP}.part"
_LINK = "120000"
_BATCH = 256
#: Maximum depth of directories, which are walked recursively.
_DEPTH = 200
#: Maximum length of a name in bytes; few file systems support more.
_NAME = 255


@dataclass(frozen=True)
class Exported:
    """The result of an export: the tree, and the numbers of written and removed files."""

    tree: str
    written: int
    removed: int


@dataclass(frozen=True)
class Difference:
    """Name the files of a folder that differ from a tree."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    untracked: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.untracked)

    def lines(self) -> list[str]:
        """Return one line per file: ``changed``, ``missing`` or ``stray``, and its path."""
        groups = (("changed", self.changed), ("missing", self.missing), ("stray", self.untracked))
        return [f"{word} {path}" for word, paths in groups for path in paths]


def export(
    store: Store, what: Release | str, folder: Path, *, keep: Sequence[str] = GENERATED_FILES
) -> Exported:
    """Update ``folder`` to a tree; entries named in ``keep`` may stay.

    Raises DiskFull, SourceError for a tree with a path or link that would lead outside, and
    UsageError for a folder that holds anything but an earlier export.
    """
    tree = store.tree_of(what)
    folder = folder.absolute()
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    with store.lock(f"tree-{name}"), translate_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(folder, keep)
        entries = _entries(store, tree)
        _refuse_unsafe(entries)
        wanted = {entry.path: entry for entry in entries}
        _refuse_twice(entries)
        stray = _strays(folder, wanted, keep)
        # A path that is only reachable through a link is removed with the link.
        real = _Real(folder)
        stale = [e for e in entries if not (real.holds(e.path) and _same(folder / e.path, e))]
        if not stale and not stray and stamped(folder) == tree:
            return Exported(tree, 0, 0)
        _stamp(folder, tree, complete=False)
        for path in stray:
            # The temporary stamp of a killed export was removed before.
            (folder / path).unlink(missing_ok=True)
        _prune(folder, wanted, keep)
        for start in range(0, len(stale), _BATCH):
            batch = stale[start : start + _BATCH]
            for entry, data in zip(batch, store.blobs([e.blob for e in batch]), strict=True):
                _put(folder, entry, data)
        _stamp(folder, tree, complete=True)
    return Exported(tree, len(stale), len(stray))


def compare(
    store: Store, what: Release | str, folder: Path, *, keep: Sequence[str] = GENERATED_FILES
) -> Difference:
    """Name the files of ``folder`` that were changed, are missing, or belong to no tree.

    Raises SourceError for a tree that `export` would refuse for a path of it.
    """
    entries = _entries(store, store.tree_of(what))
    _refuse_unsafe(entries)
    real = _Real(folder)
    missing = [e.path for e in entries if not real.holds(e.path)]
    gone = set(missing)
    changed = [e.path for e in entries if e.path not in gone and not _same(folder / e.path, e)]
    stray = _strays(folder, {e.path: e for e in entries}, keep)
    return Difference(tuple(changed), tuple(missing), tuple(stray))


def check_unchanged(store: Store, folder: Path) -> None:
    """Raise UsageError if files of an earlier export were changed: another export removes that."""
    tree = stamped(folder)
    if tree is None:
        return
    try:
        lines = compare(store, tree, folder).lines()
    except (GitError, SourceError):  # the tree of another store
        return
    if lines:
        msg = f"{folder} has changes ({lines[0]}), which would be lost; name a new directory"
        raise UsageError(msg)


def _entries(store: Store, tree: str) -> list[TreeEntry]:
    """Return the entries of a tree without a stamp that was committed with an earlier export."""
    return [entry for entry in store.entries(tree) if entry.path != STAMP]


def stamped(folder: Path) -> str | None:
    """Return the tree that was exported to ``folder`` completely, or None."""
    try:
        facts = json.loads((folder / STAMP).read_text("utf-8"))
        return str(facts["tree"]) if facts["complete"] is True else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _stamp(folder: Path, tree: str, *, complete: bool) -> None:
    write_text_atomic(folder / STAMP, json.dumps({"tree": tree, "complete": complete}) + "\n")


def _refuse_foreign(folder: Path, keep: Sequence[str]) -> None:
    """Refuse a folder with files that no export put there: they would all be removed."""
    if (folder / ".git").exists() and ".git" not in keep:
        msg = f"{folder} is a git repository, which would be removed; name a new directory"
        raise UsageError(msg)
    if (folder / STAMP).is_file():
        return
    # An export that was killed early has no stamp.
    tops = {name.split("/")[0] for name in keep}
    foreign = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in tops and not (path.name == _STAMP_PART and _is_plain(path))
    )
    if foreign:
        msg = f"{folder} holds other files ({foreign[0]}); name an empty or a new directory"
        raise UsageError(msg)


def _is_plain(file: Path) -> bool:
    return stat.S_ISREG(file.lstat().st_mode)


def _refuse_unsafe(entries: Iterable[TreeEntry]) -> None:
    """Refuse a tree with a path that leads out, is reserved, or cannot be written."""
    for path in (entry.path for entry in entries):
        parts = path.split("/")
        bad = any(part.lower() in ("", ".", "..", ".git") for part in parts)
        ours = parts[0].lower() in (STAMP, _STAMP_PART, _PART)
        long = len(parts) > _DEPTH or len(os.fsencode(path)) > tree_limits.MAX_PATH_BYTES
        long = long or any(len(os.fsencode(part)) > _NAME for part in parts)
        if bad or ours or long or "\\" in path:
            msg = f"the tree has an unsafe path {path!r}; it cannot be exported"
            raise SourceError(msg)


def _refuse_twice(entries: Sequence[TreeEntry]) -> None:
    """Refuse a tree in which a name is both a file and a directory, as git objects allow."""
    counts = Counter(entry.path for entry in entries)
    counts.update(_folders_of(set(counts)))
    path, times = max(counts.items(), key=lambda found: found[1], default=("", 0))
    if times > 1:
        msg = f"the tree holds {path!r} twice; it was not exported"
        raise SourceError(msg)


def _folders_of(paths: Iterable[str]) -> set[str]:
    """Return the parent directories of these paths; the root is an empty text."""
    found = {""}
    for path in paths:
        parent = posixpath.dirname(path)
        while parent not in found:
            found.add(parent)
            parent = posixpath.dirname(parent)
    return found


class _Real:
    """List the content of a directory without following links below it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = {"": True}

    def holds(self, path: str) -> bool:
        """Return whether this path exists, without following links."""
        return self._is_folder(posixpath.dirname(path)) and os.path.lexists(self._root / path)

    def _is_folder(self, path: str) -> bool:
        if path not in self._folders:
            file = self._root / path
            found = self._is_folder(posixpath.dirname(path))
            self._folders[path] = found and file.is_dir() and not file.is_symlink()
        return self._folders[path]


def _kept(path: str, keep: Iterable[str]) -> bool:
    return any(path == name or path.startswith(name.rstrip("/") + "/") for name in keep)


def _strays(folder: Path, wanted: dict[str, TreeEntry], keep: Sequence[str]) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder).as_posix()
        prefix = "" if below == "." else below + "/"
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*files, *links):
            path = prefix + name
            if path not in wanted and path != STAMP and not _kept(path, keep):
                found.append(path)
    return sorted(found)


def _prune(folder: Path, wanted: dict[str, TreeEntry], keep: Sequence[str]) -> None:
    needed = _folders_of(wanted)
    for place, _folders, _files in os.walk(folder, topdown=False):
        below = Path(place).relative_to(folder).as_posix()
        if below != "." and below not in needed and not _kept(below, keep):
            try:
                Path(place).rmdir()
            except OSError:
                # The directory still contains kept files.
                continue


def _same(file: Path, entry: TreeEntry) -> bool:
    try:
        facts = file.lstat()
        if entry.mode == _LINK:
            data = os.fsencode(file.readlink()) if stat.S_ISLNK(facts.st_mode) else None
        else:
            runs = bool(facts.st_mode & 0o100)
            alike = stat.S_ISREG(facts.st_mode) and runs == _is_program(entry)
            data = file.read_bytes() if alike else None
    except OSError:
        return False
    return data is not None and blob_id(data) == entry.blob


def _is_program(entry: TreeEntry) -> bool:
    return entry.mode == "100755"


def blob_id(data: bytes) -> str:
    """Return git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _put(folder: Path, entry: TreeEntry, data: bytes) -> None:
    file = folder / entry.path
    _make_folder(folder, file.parent)
    if file.is_dir() and not file.is_symlink():
        msg = f"{file} is a directory where the tree has a file; remove it"
        raise SourceError(msg)
    part = folder / _PART
    part.unlink(missing_ok=True)
    try:
        if entry.mode == _LINK:
            part.symlink_to(_target(entry, data))
        else:
            with part.open("xb") as out:
                out.write(data)
            part.chmod(0o755 if _is_program(entry) else 0o644)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _target(entry: TreeEntry, data: bytes) -> str:
    """Return the target of a link. Raises SourceError if it is outside of the tree or invalid."""
    target = os.fsdecode(data)
    if _leads_out(entry.path, target):
        shown = target[: tree_limits.MAX_PATH_BYTES]
        msg = f"the link {entry.path} points outside of the tree, to {shown!r}"
        raise SourceError(msg)
    if not data or len(data) > tree_limits.MAX_PATH_BYTES or b"\0" in data:
        shown = target[: tree_limits.MAX_PATH_BYTES]
        msg = f"the link {entry.path} has a target that no link can have, {shown!r}"
        raise SourceError(msg)
    return target


def _leads_out(path: str, target: str) -> bool:
    """Return whether a link's target is, or may be, outside of its tree."""
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if target.startswith("/") or inside.split("/")[0] == "..":
        return True
    # `up/..` can lead elsewhere if `up` is a link, so `..` may occur at the start only.
    words = [word for word in target.split("/") if word not in ("", ".")]
    down = next((at for at, word in enumerate(words) if word != ".."), len(words))
    return ".." in words[down:]


def _make_folder(root: Path, folder: Path) -> None:
    """Create a directory below ``root`` without following a link in its path."""
    if folder == root or (folder.is_dir() and not folder.is_symlink()):
        if folder != root:
            _make_folder(root, folder.parent)
        return
    _make_folder(root, folder.parent)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    folder.mkdir(exist_ok=True)
