"""The bare git repository with every release: read, add commits, export.

Objects are immutable and named by their content, so readers need no lock. Only the list of shallow
commits and the refs are written under the store's file lock, last, so that an interrupted import
leaves nothing that anyone would find.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.errors import ArchiveError, GitError, SourceError
from pyllamakv.home import home
from pyllamakv.source import era, git_command
from pyllamakv.source.files import inheritable_lock, locked
from pyllamakv.source.files import translate_disk_errors as translate_disk_errors
from pyllamakv.source.files import write_text_atomic as write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyllamakv.source.releases import Release
    from pyllamakv.source.tree_export import Difference, Exported


#: Maximum number of parents of a commit, more than any merge has; each is looked up.
PARENTS = 64

_PREFIX = "tmp-"
#: Maximum number of files in memory while objects are verified.
_BATCH = 256


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary directory below ``parent``, and remove stale ones."""
    for old in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = _taken(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                shutil.rmtree(old)
            finally:
                os.close(handle)
    with translate_disk_errors(parent):
        folder, handle = _made(parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _made(parent: Path) -> tuple[Path, int]:
    """Create a directory and lock it; retry if another process removed it as stale."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):
            handle = _taken(folder, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, handle
            os.close(handle)


def _taken(folder: Path, how: int) -> int:
    """Lock a folder and return its descriptor. Raises OSError when it is gone or another's."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
    except OSError:
        os.close(handle)
        raise
    return handle


#: Lock files of git. A killed git leaves them, which blocks every later write.
_LOCKS = ("HEAD.lock", "config.lock", "packed-refs.lock", "shallow.lock")

#: Content is stored and compared byte by byte, regardless of a tree's .gitattributes.
_ATTRIBUTES = "* -text -eol -filter -ident -working-tree-encoding -export-ignore -export-subst\n"


class TreeEntry(NamedTuple):
    """Describe one file of a tree: its mode as git writes it, its blob and its path."""

    mode: str
    blob: str
    path: str


class Store:
    """Read and extend one bare repository. Revisions are commits, trees or refs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks = path.parent / "locks"

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    # --- reading ------------------------------------------------------------------------------

    def tree_of(self, what: Release | str) -> str:
        """Return the id of the tree of a release, commit or ref. Raises SourceError if absent."""
        name = what if isinstance(what, str) else what.commit
        shown = what if isinstance(what, str) else what.name
        done = self._resolve(f"{name}^{{tree}}") if name else ""
        if not done:
            msg = f"{shown} is not in the store; run `pyllamakv upstream fetch {shown}` first"
            raise SourceError(msg)
        return done

    def has(self, release: Release) -> bool:
        """Return whether a release was imported completely."""
        return bool(release.commit) and self.ref(f"refs/upstream/{release.key}") == release.commit

    def ref(self, name: str) -> str | None:
        """Return the object that a ref points at, or None."""
        return self._resolve(name) or None

    def refs(self, prefix: str) -> dict[str, str]:
        """Return the refs below a prefix, with their objects."""
        out = git_command.git(
            self.path, "for-each-ref", "--format=%(objectname) %(refname)", prefix
        )
        pairs = (line.split(" ", 1) for line in out.splitlines())
        return {name: sha for sha, name in pairs}

    def entries(self, what: Release | str, prefix: str = "") -> list[TreeEntry]:
        """Return the files of a tree, without submodules, in git's order."""
        tree = self.tree_of(what)
        out = git_command.git(self.path, "ls-tree", "-r", "-z", "--full-tree", tree)
        found = []
        below = prefix.rstrip("/") + "/" if prefix else ""
        for record in out.split("\0"):
            if not record:
                continue
            facts, path = record.split("\t", 1)
            mode, kind, blob = facts.split(" ")
            if kind == "blob" and (path.startswith(below) or path == prefix):
                found.append(TreeEntry(mode, blob, path))
        return found

    def ls(self, what: Release | str, prefix: str = "") -> list[str]:
        """Return the paths of a tree that equal ``prefix`` or are below it."""
        return [entry.path for entry in self.entries(what, prefix)]

    def read(self, what: Release | str, path: str) -> bytes | None:
        """Return the content of a file of a tree, or None when it has no such file."""
        return self.read_many(what, [path])[path]

    def read_text(self, what: Release | str, path: str) -> str:
        """Return the text of a file of a tree, empty when it has no such file."""
        return (self.read(what, path) or b"").decode("utf-8", "surrogateescape")

    def read_many(self, what: Release | str, paths: Sequence[str]) -> dict[str, bytes | None]:
        """Return the contents of several files of a tree; None for those it has not."""
        tree = self.tree_of(what)
        # git reads requests line by line and strips a final carriage return, so such names are
        # looked up by their blobs.
        odd = {path for path in paths if "\n" in path or path.endswith("\r")}
        blobs = {entry.path: entry.blob for entry in self.entries(tree)} if odd else {}
        names = [blobs.get(path, tree) if path in odd else f"{tree}:{path}" for path in paths]
        return dict(zip(paths, self._contents(names), strict=True))

    def blobs(self, ids: Sequence[str]) -> list[bytes]:
        """Return the contents of blobs. Raises SourceError when one is missing."""
        found = self._contents(ids)
        lost = [name for name, data in zip(ids, found, strict=True) if data is None]
        if lost:
            msg = f"the store lacks object {lost[0]}; fetch the release again"
            raise SourceError(msg)
        return [data for data in found if data is not None]

    def _contents(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        asked = "".join(f"{name}\n" for name in names)
        out = git_command.git_bytes(self.path, "cat-file", "--batch", input=asked)
        found: list[bytes | None] = []
        at = 0
        for _ in names:
            end = out.index(b"\n", at)
            facts = out[at:end].rsplit(b" ", 2)
            at = end + 1
            if len(facts) != 3 or not facts[2].isdigit():
                found.append(None)
                continue
            size = int(facts[2])
            found.append(out[at : at + size] if facts[1] == b"blob" else None)
            at += size + 1
        return found

    def _resolve(self, name: str) -> str:
        return git_command.git(
            self.path, "rev-parse", "--verify", "--quiet", "--end-of-options", name, check=False
        )

    def parents(self, commit: str) -> list[str]:
        """Return the parents that a commit names, also those that the store lacks.

        Raises ArchiveError for more than `PARENTS`.
        """
        return commit_parents(self._commit_text(commit))

    def date(self, commit: str) -> str:
        """Return when a commit was made, ISO 8601 in UTC. Raises ArchiveError where it has none."""
        return commit_date(self._commit_text(commit))

    def _commit_text(self, commit: str) -> str:
        return git_command.git(self.path, "cat-file", "commit", commit)

    def _reaches_back(self, commit: str) -> bool:
        """Return whether the history of a commit is there, to its first commit or a shallow one."""
        words = ("rev-list", "--quiet", commit, "--")
        return not git_command.run(self.path, *words, bounded=True).returncode

    # --- writing ------------------------------------------------------------------------------

    def commit(
        self, parent: str | None, files: Mapping[str, bytes | None], message: str
    ) -> tuple[str, str]:
        """Create a commit on ``parent`` with changed files (None deletes); return (commit, tree).

        The same arguments give the same ids on any machine. New files are plain; changed ones keep
        their mode. No ref is moved.
        """
        modes = {e.path: e.mode for e in self.entries(parent)} if parent else {}
        lines = []
        for path, data in sorted(files.items()):
            if data is None:
                lines.append(f"0 {'0' * 40}\t{path}\0")
                continue
            blob = self._write("hash-object", "-w", "-t", "blob", "--stdin", input=data)
            lines.append(f"{modes.get(path, '100644')} {blob}\t{path}\0")
        with self.scratch() as folder:
            env = {"GIT_INDEX_FILE": str(folder / "index")}
            if parent:
                self._write("read-tree", self.tree_of(parent), env=env)
            self._write("update-index", "-z", "--index-info", input="".join(lines), env=env)
            tree = self._write("write-tree", env=env)
        return self.commit_tree(tree, [parent] if parent else [], message), tree

    def commit_tree(
        self, tree: str, parents: Sequence[str], message: str, date: str | None = None
    ) -> str:
        """Create a commit of a whole tree, with the fixed identity; ``date`` is the author's."""
        options = [word for parent in parents for word in ("-p", parent)]
        env = {"GIT_AUTHOR_DATE": date} if date else {}
        text = message if message.endswith("\n") else message + "\n"
        return self._write("commit-tree", tree, *options, input=text, env=env)

    def update_ref(self, name: str, commit: str) -> None:
        """Point a ref at a commit; a history that the store lacks, or has in part, is cut off.

        Git would refuse to fetch anything into a store with a ref whose history it cannot walk.
        """
        with self.ref_lock() as held:
            if not self._reaches_back(commit):
                file = self.path / "shallow"
                known = file.read_text("ascii").split() if file.is_file() else []
                if commit not in known:
                    write_text_atomic(file, "".join(f"{c}\n" for c in sorted({*known, commit})))
            self._write("update-ref", name, commit, hold=(held,))

    def delete_ref(self, name: str) -> None:
        """Delete a ref; its objects stay."""
        with self.ref_lock() as held:
            self._write("update-ref", "-d", name, hold=(held,))

    def export(
        self, what: Release | str, folder: Path, *, keep: Sequence[str] | None = None
    ) -> Exported:
        """Update ``folder`` to a tree, writing only files that differ."""
        from pyllamakv.source import tree_export

        return tree_export.export(
            self, what, folder, keep=tree_export.GENERATED_FILES if keep is None else keep
        )

    def compare(
        self, what: Release | str, folder: Path, *, keep: Sequence[str] | None = None
    ) -> Difference:
        """Name the files of ``folder`` that differ from a tree."""
        from pyllamakv.source import tree_export

        return tree_export.compare(
            self, what, folder, keep=tree_export.GENERATED_FILES if keep is None else keep
        )

    def problems(self, release: Release) -> list[str]:
        """Return the differences between the store and the lock file for a release.

        git reads and hashes every object of its tree, which also finds damage on the disk.
        """
        found = self.ref(f"refs/upstream/{release.key}")
        if found is None:
            return ["not fetched"]
        if found != release.commit:
            return [f"the store holds commit {found}, the lock says {release.commit}"]
        try:
            tree = self.tree_of(release)
            blobs = sorted({entry.blob for entry in self.entries(tree)})
            git_command.git(self.path, "rev-list", "--objects", "--quiet", tree)
            damaged = self._damaged(blobs)
        except (GitError, SourceError) as error:
            return [f"objects are missing or damaged: {error}"]
        faults = []
        if tree != release.tree:
            faults.append(f"the store holds tree {tree}, the lock says {release.tree}")
        if damaged:
            faults.append(f"object {damaged[0]} is damaged ({len(damaged)} in all)")
        now = era.detect(self, tree)
        if now != release.era:
            faults.append(f"its files look like era {now}, the lock says {release.era}")
        return faults

    def _damaged(self, blobs: list[str]) -> list[str]:
        from pyllamakv.source.tree_export import blob_id

        bad = []
        for start in range(0, len(blobs), _BATCH):
            batch = blobs[start : start + _BATCH]
            found = self.blobs(batch)
            bad += [name for name, data in zip(batch, found, strict=True) if blob_id(data) != name]
        return bad

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Yield a folder on the store's file system; it is removed at the end."""
        return scratch_folder(self.path)

    @contextlib.contextmanager
    def ref_lock(self) -> Iterator[int]:
        """Lock the references for writing; yield a descriptor for git to inherit.

        Removes lock files of a killed git. Its parent may have been killed alone, so a running git
        keeps the lock through the descriptor that it inherited.
        """
        with self.lock(), inheritable_lock(self._locks / "store.busy") as held:
            for left in (*map(self.path.joinpath, _LOCKS), *self.path.glob("refs/**/*.lock")):
                left.unlink(missing_ok=True)
            yield held

    def lock(self, name: str = "store") -> contextlib.AbstractContextManager[None]:
        """Return a file lock of this store; ``store`` guards its refs."""
        return locked(self._locks / f"{name}.lock")

    def _write(
        self,
        *args: str,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        hold: Sequence[int] = (),
    ) -> str:
        with translate_disk_errors(self.path):
            return git_command.git(self.path, *args, input=input, env=env, hold=hold)


def open_store(path: Path | None = None) -> Store:
    """Open the store of the data directory, or the one at ``path``; create a missing one."""
    store = Store((path or home() / "store.git").absolute())
    if _whole(store.path):
        return store
    with translate_disk_errors(store.path), store.ref_lock() as held:
        if not _whole(store.path):
            store.path.mkdir(parents=True, exist_ok=True)
            git_command.git(store.path, "init", "-q", "--bare", ".", hold=(held,))
            git_command.git(store.path, "config", "gc.auto", "0", hold=(held,))
            info = store.path / "info"
            info.mkdir(exist_ok=True)
            write_text_atomic(info / "attributes", _ATTRIBUTES)
    return store


def _whole(path: Path) -> bool:
    # The attributes are written last, so their presence proves that the store is complete.
    return (path / "HEAD").is_file() and (path / "info" / "attributes").is_file()


def commit_parents(text: str) -> list[str]:
    """Return the parents that a commit names, each once. Raises ArchiveError for too many."""
    found = list(dict.fromkeys(value for key, value in _header(text) if key == "parent"))
    if len(found) > PARENTS:
        msg = f"the commit has {len(found)} parents; no commit of a release has more than {PARENTS}"
        raise ArchiveError(msg)
    return found


def commit_date(text: str) -> str:
    """Return when a commit was made, ISO 8601 in UTC. Raises ArchiveError where it has no date."""
    committer = next((value for key, value in _header(text) if key == "committer"), "")
    try:
        when = datetime.fromtimestamp(int(committer.rsplit(" ", 2)[1]), tz=UTC)
    except (IndexError, ValueError, OverflowError, OSError) as error:
        msg = f"the commit has no valid date: committer {committer[:200]!r}"
        raise ArchiveError(msg) from error
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _header(text: str) -> list[tuple[str, str]]:
    lines = text.split("\n\n", 1)[0].split("\n")
    return [(key, value) for key, _, value in (line.partition(" ") for line in lines)]
