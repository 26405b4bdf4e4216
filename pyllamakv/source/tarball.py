"""Read untrusted gzipped tar archives in one pass, with the limits of a release.

A header may declare any size, and data that tarfile reads into memory: long names, attributes,
sparse maps. Therefore, the bytes read are counted, and those of headers separately.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pyllamakv.errors import ArchiveError
from pyllamakv.source import tree_limits
from pyllamakv.source.files import translate_disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Maximum size of a member, more than any pack of a release.
FILE = 1 << 30
#: Maximum size of the headers of a member; a path and its attributes take a few hundred bytes.
HEADER = 64 << 10
#: All headers together: those of `tree_limits.MAX_FILES` members of 512 bytes each.
HEADERS = 128 << 20
#: Maximum number of attributes for all members; git writes one.
_SHARED = 16
_CHUNK = 1 << 20


@contextmanager
def open_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a gzipped tar for one pass; reading to the end checks length and checksum.

    Raises ArchiveError for other data, and if the content exceeds the size of a release.
    """
    try:
        with gzip.open(archive, "rb") as file:
            unpacked = _Stream(file)
            with _Tar(fileobj=unpacked) as tar:  # type: ignore[arg-type]
                yield tar
            while unpacked.read(_CHUNK):
                pass
    except FileNotFoundError as error:
        msg = f"there is no archive {archive}"
        raise ArchiveError(msg) from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        msg = f"{archive.name} is truncated, or not a gzipped tar archive: {error}"
        raise ArchiveError(msg) from error


def is_plain(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a file with all of its content in the archive."""
    # A sparse member is larger than its data in the archive.
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def content(tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int = FILE) -> bytes:
    """Return the bytes of a plain member. Raises ArchiveError for another, or more than a limit."""
    return _open(tar, member, limit).read()


def copy_member(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> Path:
    """Copy a plain member to a file with a generated name."""
    source = _open(tar, member, FILE)
    with translate_disk_errors(file), file.open("xb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
    return file


def _open(tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> IO[bytes]:
    source = tar.extractfile(member) if is_plain(member) else None
    if source is None or member.size > limit:
        msg = f"{member.name} in the archive is not a file of a plausible size"
        raise ArchiveError(msg)
    return source


class _Tar(tarfile.TarFile):
    """Read one member after another and keep none of them."""

    fileobj: _Stream  # type: ignore[assignment]
    members: list[tarfile.TarInfo]
    firstmember: tarfile.TarInfo | None

    def next(self) -> tarfile.TarInfo | None:
        self.members.clear()
        if self.firstmember is not None:  # it was read when the archive was opened
            return super().next()
        # Skip the rest of the previous member.
        self.fileobj.seek(max(self.fileobj.tell(), self.offset - 1))
        try:
            with self.fileobj.header():
                member = super().next()
        except (ValueError, LookupError, OverflowError, RecursionError) as error:
            # A header field is not a number, or out of range.
            msg = f"a header cannot be read: {type(error).__name__}"
            raise tarfile.ReadError(msg) from error
        if len(self.pax_headers) > _SHARED:
            msg = f"the archive has more than {_SHARED} attributes for all that is in it"
            raise ArchiveError(msg)
        if member is not None and member.size < 0:
            msg = f"{member.name[:HEADER]} has a size below zero"
            raise tarfile.ReadError(msg)
        if member is not None and member.size > tree_limits.MAX_BYTES:
            raise _endless()
        return member


class _Stream:
    """Read an archive forward, and stop when it exceeds a limit."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._at = 0
        self._texts = HEADERS
        self._text: int | None = None

    def tell(self) -> int:
        return self._at

    def seek(self, place: int) -> int:
        """Read to a position, or to the end if that comes first."""
        if place < self._at:
            msg = "a header points backwards"
            raise tarfile.StreamError(msg)
        while self._at < place and self.read(min(_CHUNK, place - self._at)):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        if size < 0:
            msg = "a header has a size below zero"
            raise tarfile.ReadError(msg)
        if self._text is not None:
            self._text -= size
            self._texts -= size
            if min(self._text, self._texts) < 0:
                msg = (
                    f"a header in the archive has more than {HEADER} bytes of text, or all of "
                    f"them more than "
                    f"{HEADERS}; the archive was refused"
                )
                raise ArchiveError(msg)
        data = self._file.read(size)
        self._at += len(data)
        if self._at > tree_limits.MAX_BYTES:
            raise _endless()
        return data

    @contextmanager
    def header(self) -> Iterator[None]:
        """Count the bytes that the block reads as one header."""
        self._text = HEADER
        try:
            yield
        finally:
            self._text = None


def _endless() -> ArchiveError:
    return ArchiveError(
        f"the archive unpacks to more than {tree_limits.MAX_BYTES} bytes; it is not to be trusted"
    )
