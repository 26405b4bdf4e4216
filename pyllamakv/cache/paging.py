"""Store branches of a cache in host memory or in files, and read them back.

A file is written under a temporary name and renamed, so it is complete or absent. It starts with a
header (owner, start and length of the branch) and a checksum of the rest. Files belong to one cache
object and are removed with it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import finalize

from pyllamakv.binding import arguments
from pyllamakv.errors import PagingError

_MAGIC = b"PLKPAGE1"
_HEAD = struct.Struct("<8sIQI")
SUFFIX = ".kvpage"


class Page(Protocol):
    """The page of a branch's tokens ``start`` to ``end``; ``refs`` nodes need it."""

    start: int
    end: int
    size: int
    refs: int

    def add_ref(self) -> None:
        """Count a node that needs the page."""

    def drop_ref(self) -> int:
        """Count a node less; return how many are left."""

    def read(self) -> bytes:
        """Return the saved sequence. Raises PagingError."""

    def drop(self) -> None:
        """Free the bytes."""


class Pager(Protocol):
    """Store pages; ``size`` is their total in bytes, and ``count`` their number."""

    size: int
    count: int

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Store a saved sequence as a page. Raises PagingError with nothing stored."""

    def close(self) -> None:
        """Drop everything that is left."""


class CountedPage:
    """Count the nodes that need a page."""

    def __init__(self) -> None:
        self.refs = 0

    def add_ref(self) -> None:
        """Count a node that needs the page."""
        self.refs += 1

    def drop_ref(self) -> int:
        """Count a node less; return how many are left."""
        self.refs -= 1
        return self.refs


class MemoryPage(CountedPage):
    """A page in host memory."""

    def __init__(self, pager: MemoryPager, saved: bytes, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end, self.size = start, end, len(saved)
        self._pager, self._saved = pager, saved
        pager.size += self.size
        pager.count += 1

    def read(self) -> bytes:
        """Return the saved sequence."""
        return self._saved

    def drop(self) -> None:
        """Free the bytes."""
        self._pager.size -= self.size
        self._pager.count -= 1
        self._saved = b""


class MemoryPager:
    """Store pages in host memory."""

    def __init__(self) -> None:
        self.size = self.count = 0

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Store a saved sequence as a page. Raises PagingError without memory for it."""
        return MemoryPage(self, saved, start, end)

    def close(self) -> None:
        """Do nothing: pages are freed with their nodes."""


class FilePage(CountedPage):
    """A page in a file."""

    def __init__(self, pager: FilePager, path: Path, start: int, end: int, size: int) -> None:
        super().__init__()
        self.start, self.end, self.size = start, end, size
        self.path = path
        self._pager = pager
        pager.size += size
        pager.count += 1

    def read(self) -> bytes:
        """Return the saved sequence. PagingError names a missing, foreign or damaged file."""
        return read(self.path, self._pager.owner, self.start, self.end)

    def drop(self) -> None:
        """Remove the file, if it exists."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._pager.size -= self.size
        self._pager.count -= 1


class FilePager:
    """Store pages as files in a folder of this cache's own inside of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.size = self.count = 0
        self.owner = uuid.uuid4().hex
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="prefixes-", dir=folder))
        except OSError as error:
            msg = f"cannot store pages in {folder}: {error.strerror}; name a writable directory"
            raise PagingError(msg, folder) from error
        # Also for a cache that is never closed. Pages can be large.
        self._remove = finalize(self, _remove, self.folder, os.getpid())

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Write a saved sequence atomically. PagingError leaves no file."""
        path = self.folder / f"{self._written}{SUFFIX}"
        self._written += 1
        about = json.dumps({"owner": self.owner, "start": start, "end": end}).encode()
        checksum = zlib.crc32(saved, zlib.crc32(about))
        head = _HEAD.pack(_MAGIC, len(about), len(saved), checksum) + about
        unfinished = path.with_suffix(".part")
        try:
            with unfinished.open("wb") as file:
                file.write(head)
                file.write(saved)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            msg = (
                f"the branch could not be written to {path}: {error.strerror or error}; the cache "
                f"is unchanged: free "
                "disk space, or evict() instead"
            )
            raise PagingError(msg, path) from error
        return FilePage(self, path, start, end, len(head) + len(saved))

    def close(self) -> None:
        """Remove the directory with its content."""
        self._remove()


def _remove(folder: Path, owner: int) -> None:
    """Remove a directory, unless this is a fork of the process that uses it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def read(path: Path, owner: str, start: int, end: int) -> bytes:
    """Return the content of a page file. Raises PagingError with the reason."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}") from error
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise _unusable(path, "it is not a page of a cache")
    _, n_about, n_saved, checksum = _HEAD.unpack_from(content)
    if len(content) != _HEAD.size + n_about + n_saved:
        expected = _HEAD.size + n_about + n_saved
        raise _unusable(path, f"it has {len(content)} bytes instead of {expected}")
    body = memoryview(content)[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise _unusable(path, "its checksum does not match")
    expected_about = {"owner": owner, "start": start, "end": end}
    about = json.loads(bytes(body[:n_about]))
    if about != expected_about:
        raise _unusable(path, "it belongs to another branch or another cache")
    return bytes(body[n_about:])


def pager(where: str | os.PathLike[str] | None) -> Pager | None:
    """Return the storage of pages: memory, a directory, or None."""
    if where is None:
        return None
    return (
        MemoryPager()
        if isinstance(where, str) and where == "memory"
        else FilePager(arguments.path("paging", where))
    )


def _unusable(path: Path, why: str) -> PagingError:
    return PagingError(f"the page {path} cannot be used: {why}; decode its tokens again", path)
