"""Check untrusted git objects in a separate directory before they enter the store.

No object of a truncated, hostile or wrong archive enters the store: git recomputes the id of every
object, the commit must be complete, and its ids must match the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError, GitError, HashMismatch
from pyllamakv.source import git_command, git_limits, tree_limits
from pyllamakv.source.files import translate_disk_errors
from pyllamakv.source.store import commit_date, commit_parents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.source.store import Store

#: Paths of llama.cpp's public header; every release has one of them.
API_HEADERS = ("include/llama.h", "llama.h")


class Quarantine:
    """Git objects that have not been checked; `quarantine` creates it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.objects = folder / "objects"
        self._unpacked = 0
        (self.objects / "pack").mkdir(parents=True)
        self._env = {
            "GIT_OBJECT_DIRECTORY": str(self.objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(store.path / "objects"),
        }

    def git(self, *args: str, input: bytes | str | Path | None = None) -> str:
        """Run git on the store, within limits, with new objects going into quarantine.

        Raises ArchiveError if a limit is reached, and GitError for other failures.
        """
        with translate_disk_errors(self.store.path):
            try:
                return git_command.git(
                    self.store.path, *args, input=input, env=self._env, bounded=True
                )
            except GitError as error:
                git_limits.raise_if_limit_hit(error, "the archive")
                raise

    def add_pack(self, pack: Path) -> None:
        """Index a pack; an index in the archive is not trusted."""
        try:
            self.git("index-pack", "--stdin", input=pack)
        except GitError as error:
            msg = f"the pack {pack.name} in the archive is damaged: {error.output.strip()}"
            raise ArchiveError(msg) from error

    def add_loose(self, name: str, data: bytes) -> None:
        """Add one loose object after checking its hash.

        Raises ArchiveError if it is wrong, or if all objects together exceed the size of a release.
        """
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(data, git_limits.MAX_OBJECT_BYTES)
        except zlib.error as error:
            msg = f"the object {name} in the archive is damaged: {error}"
            raise ArchiveError(msg) from error
        self._unpacked += len(content)
        if self._unpacked > tree_limits.MAX_BYTES:
            msg = f"the archive has more than {tree_limits.MAX_BYTES} bytes in loose objects"
            raise ArchiveError(msg)
        found = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        if not unpacker.eof or found != name:
            msg = f"the object {name} in the archive does not match its name"
            raise ArchiveError(msg)
        file = self.objects / name[:2] / name[2:]
        file.parent.mkdir(exist_ok=True)
        with translate_disk_errors(file):
            file.write_bytes(data)
        file.chmod(0o444)

    def admit(self, commit: str, *, expected_commit: str = "", expected_tree: str = "") -> str:
        """Check the commit and move all objects into the store; return the commit's tree.

        Raises HashMismatch when commit or tree is not the expected one, ArchiveError when the
        commit is not whole, has no date, or its tree exceeds the limits or is not llama.cpp.
        """
        if expected_commit and commit != expected_commit:
            _mismatch("commit", expected_commit, commit)
        try:
            tree = self.git("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}")
            self.git("rev-list", "--objects", "--quiet", tree)
            commit_text = self.git("cat-file", "commit", commit)
            kind = self.git("cat-file", "-t", commit)
        except GitError as error:
            msg = f"the archive lacks objects of commit {commit}: {error.output.strip()}"
            raise ArchiveError(msg) from error
        if kind != "commit":  # git peels a tag wherever it wants a commit, but not in a ref
            msg = f"the archive has the {kind} {commit} instead of a commit"
            raise ArchiveError(msg)
        if expected_tree and tree != expected_tree:
            _mismatch("tree", expected_tree, tree)
        tree_limits.check(self.store.path, tree, self._env)
        if not self.git("ls-tree", "--name-only", tree, *API_HEADERS):
            msg = f"the archive has no llama.cpp: neither {' nor '.join(API_HEADERS)} exists"
            raise ArchiveError(msg)
        # The caller needs date and parents, so a commit without them must not enter the store.
        commit_date(commit_text)
        commit_parents(commit_text)
        move(self.objects, self.store)
        return tree


def move(objects: Path, store: Store) -> None:
    """Move packs and loose objects into the store, and nothing else that git may have written."""
    # Packs are moved before their indexes, which would otherwise name missing objects.
    order = {".pack": 0, ".rev": 1, ".idx": 2}
    files = [file for file in objects.rglob("*") if file.is_file() and file.parent.name != "info"]
    with translate_disk_errors(store.path):
        for file in sorted(files, key=lambda f: (order.get(f.suffix, 0), str(f))):
            place = store.path / "objects" / file.relative_to(objects)
            place.parent.mkdir(exist_ok=True)
            if not place.exists():
                os.replace(file, place)  # noqa: PTH105 - the name says that it is atomic


def _mismatch(what: str, expected: str, found: str) -> None:
    msg = (
        f"the archive holds {what} {found}, but the lock file expects {expected}; "
        "the archive was refused"
    )
    raise HashMismatch(msg, expected, found)


@contextlib.contextmanager
def quarantine(store: Store) -> Iterator[Quarantine]:
    """Yield a quarantine, and delete objects that were not admitted."""
    with store.scratch() as folder:
        yield Quarantine(store, folder)
