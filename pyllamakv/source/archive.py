"""Take the git objects of llama.cpp out of an sdist of llama-cpp-python; run nothing of it.

Members are picked by their whole name and written under names of our own, so links, odd paths,
configs and hooks of the archive never reach the disk. An sdist without the embedded clone is read
as a plain tree instead.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pyllamakv.errors import ArchiveError
from pyllamakv.source import bounds
from pyllamakv.source.files import disk_room
from pyllamakv.source.plain import PlainFile, import_files
from pyllamakv.source.quarantine import quarantine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from pyllamakv.source.quarantine import Quarantine
    from pyllamakv.source.store import Store

_CLONE = re.compile(
    r"[^/]+/\.git/modules/vendor/llama\.cpp/"
    r"(?:(?P<head>HEAD)|(?P<packed>packed-refs)|(?P<ref>refs/heads/[\w.-]+)"
    r"|objects/pack/pack-(?P<pack>[0-9a-f]{40})\.pack"
    r"|objects/(?P<high>[0-9a-f]{2})/(?P<low>[0-9a-f]{38}))"
)
_TREE = re.compile(r"[^/]+/vendor/llama\.cpp/(?P<path>.+)", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")

_TEXT_LIMIT = 1 << 20
_FILE_LIMIT = 1 << 30
_CHUNK = 1 << 20
#: Members that are texts about the next one: long names, and extended headers.
_TEXTS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def import_sdist(
    store: Store, archive: Path, *, commit: str = "", tree: str = ""
) -> tuple[str, str]:
    """Import an sdist's llama.cpp; return its commit and tree. No ref is made.

    ``commit`` and ``tree``, where given, must be the ones found. Raises ArchiveError for an archive
    that is truncated, hostile or holds no llama.cpp, HashMismatch for another commit or tree.
    """
    with quarantine(store) as held:
        head = _take_clone(archive, held)
        if head:
            return head, held.admit(head, expected_commit=commit, expected_tree=tree)
        head = import_files(held, _plain_files(archive), f"llama.cpp as unpacked in {archive.name}")
        if not head:
            msg = f"{archive.name} holds neither a git clone nor a tree under vendor/llama.cpp"
            raise ArchiveError(msg)
        return head, held.admit(head, expected_commit=commit, expected_tree=tree)


def _take_clone(archive: Path, held: Quarantine) -> str:
    texts: dict[str, str] = {}
    packs = []
    seen: set[str] = set()
    with open_tar(archive) as tar:
        for member, found in _members(tar, _CLONE):
            if member.name in seen:
                msg = f"{archive.name} holds {member.name} twice; it is not to be trusted"
                raise ArchiveError(msg)
            seen.add(member.name)
            part = found.groupdict()
            if part["pack"]:
                packs.append(copy_member(tar, member, held.folder / f"{part['pack']}.pack"))
            elif part["high"]:
                held.add_loose(part["high"] + part["low"], _content(tar, member, _FILE_LIMIT))
            else:
                name = part["head"] or part["ref"] or "packed-refs"
                texts[name] = _content(tar, member, _TEXT_LIMIT).decode("ascii", "replace")
    if not packs and not seen - {"HEAD"}:
        return ""
    for pack in packs:
        held.add_pack(pack)
    return _head(texts, archive)


def _head(texts: dict[str, str], archive: Path) -> str:
    value = texts.get("HEAD", "").strip()
    if value.startswith("ref: "):
        name = value.removeprefix("ref: ")
        packed = (line.split(" ", 1) for line in texts.get("packed-refs", "").splitlines())
        known = {pair[1].strip(): pair[0] for pair in packed if len(pair) == 2}
        value = texts.get(name, known.get(name, "")).strip()
    if not _COMMIT.fullmatch(value):
        msg = f"the clone in {archive.name} names no commit in its HEAD"
        raise ArchiveError(msg)
    return value


def _plain_files(archive: Path) -> Iterator[PlainFile]:
    with open_tar(archive) as tar:
        for member in tar:
            found = _TREE.fullmatch(member.name)
            if not found or member.isdir():
                continue
            path = found["path"]
            if member.issym():
                yield PlainFile(path, "120000", member.linkname.encode("utf-8", "surrogateescape"))
            elif _is_plain(member):
                mode = "100755" if member.mode & 0o100 else "100644"
                yield PlainFile(path, mode, _content(tar, member, _FILE_LIMIT))
            else:
                msg = f"{archive.name} holds {member.name}, which is no plain file"
                raise ArchiveError(msg)


def _members(
    tar: tarfile.TarFile, pattern: re.Pattern[str]
) -> Iterator[tuple[tarfile.TarInfo, re.Match[str]]]:
    for member in tar:
        found = pattern.fullmatch(member.name)
        if not found:
            continue
        if not _is_plain(member):
            msg = f"{member.name} in the archive is no plain file; it is not to be trusted"
            raise ArchiveError(msg)
        yield member, found


def _is_plain(member: tarfile.TarInfo) -> bool:
    # A sparse member is larger than what the archive holds of it.
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def _open(tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> IO[bytes]:
    source = tar.extractfile(member) if _is_plain(member) else None
    if source is None or member.size > limit:
        msg = f"{member.name} in the archive is no file of a reasonable size"
        raise ArchiveError(msg)
    return source


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> bytes:
    return _open(tar, member, limit).read()


def copy_member(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> Path:
    """Copy a plain member to a file of our own naming."""
    source = _open(tar, member, _FILE_LIMIT)
    with disk_room(file), file.open("xb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
    return file


class _Member(tarfile.TarInfo):
    """Read a header, and refuse one whose text tarfile would take into memory as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _TEXTS and member.size > _TEXT_LIMIT:
            msg = (
                f"a header in the archive has {member.size} bytes of text; it is not to be trusted"
            )
            raise ArchiveError(msg)
        return member


class _Bounded:
    """Read a stream and refuse to go on where it grows past all bounds."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = bounds.BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            msg = f"the archive unpacks to more than {bounds.BYTES} bytes; it is not to be trusted"
            raise ArchiveError(msg)
        return data


@contextmanager
def open_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a gzipped tar for one pass; reading it to its end checks its length and checksum.

    Raises ArchiveError for what is no such archive, and as soon as more comes out than any release
    holds.
    """
    try:
        with gzip.open(archive, "rb") as file:
            unpacked = _Bounded(file)
            with tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_Member) as tar:  # type: ignore[call-overload]
                yield tar
            while unpacked.read(_CHUNK):
                pass
    except FileNotFoundError as error:
        msg = f"there is no archive {archive}"
        raise ArchiveError(msg) from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        msg = f"{archive.name} is truncated or no gzipped tar archive: {error}"
        raise ArchiveError(msg) from error
