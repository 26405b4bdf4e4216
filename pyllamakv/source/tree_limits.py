"""Refuse trees that are small in git's storage and huge when exported."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NoReturn

from pyllamakv.errors import ArchiveError, GitError
from pyllamakv.source import git_command, git_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

#: Limits of a tree; llama.cpp has two thousand files of 100 MB in total.
MAX_FILES, MAX_BYTES = 200_000, 4 << 30
#: Maximum bytes of a path or of a link target; some file systems support no more.
MAX_PATH_BYTES = 512
#: Maximum total length of all paths.
MAX_NAMES_BYTES = 256 << 20
#: Maximum size of an unpacked index page: a hundred thousand files. Parsing it needs many times as
#: much memory.
MAX_INDEX_PAGE_BYTES = 16 << 20
_CHUNK = 1 << 20


def check(folder: Path, tree: str, env: Mapping[str, str] | None = None) -> None:
    """Raise ArchiveError for a tree with more files or bytes than any release.

    ``folder`` is the repository. The list of files is streamed, because nested trees can name more
    files than fit into memory.
    """
    words = ("ls-tree", "-r", "-l", "-z", "--full-tree", tree)
    count = TreeSizeLimit(f"tree {tree}")
    names = 0
    rest = b""
    try:
        with git_command.stream(folder, *words, env=env, bounded=True) as listed:
            while chunk := listed.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\0")
                for line in lines:
                    count.add(_size(line))
                names += len(chunk)
                if names > MAX_NAMES_BYTES:
                    count.refuse()
    except GitError as error:
        git_limits.raise_if_limit_hit(error, f"tree {tree}")
        if error.code < 0:
            msg = f"tree {tree} has more nested directories than git can process"
            raise ArchiveError(msg) from error
        raise


def within(folder: Path, paths: Iterable[str]) -> list[str]:
    """Return the paths of files in a folder; raise ArchiveError for more than any release has."""
    count = TreeSizeLimit(str(folder))
    found = []
    for path in paths:
        try:
            facts = (folder / path).lstat()
        except OSError:
            continue
        count.add(facts.st_size if stat.S_ISREG(facts.st_mode) else 0)
        found.append(path)
    return found


class TreeSizeLimit:
    """Count files and bytes. Raises ArchiveError above the limits."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._files = self._bytes = 0

    def add(self, size: int) -> None:
        """Count a file of ``size`` bytes."""
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES or self._bytes > MAX_BYTES or size > git_limits.MAX_OBJECT_BYTES:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raise ArchiveError."""
        msg = (
            f"{self._what} has more than {MAX_FILES} files, {MAX_BYTES} bytes, or "
            f"{git_limits.MAX_OBJECT_BYTES} bytes in one file; refused, because no "
            "release is that large"
        )
        raise ArchiveError(msg)


def _size(line: bytes) -> int:
    words = line.split(b"\t", 1)[0].split()
    return int(words[3]) if len(words) > 3 and words[3].isdigit() else 0
