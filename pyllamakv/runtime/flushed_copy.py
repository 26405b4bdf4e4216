"""Copy the files of a kept cache at each flush, so that a killed process loses no flush.

A decode changes the mapped file of a kept cache in place. If the process is killed, the file is
dirty, and its last flush is lost. `write` therefore copies the files of a cache (NAME, NAME.1 of a
sliding window) to NAME.flushed, and `restore` copies them back. A copy has holes instead of zeros.
The format of both is that of the patch mmap-kv (`struct header` in
patches/shared/src/llama-kv-mmap.h).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from pyllamakv.errors import KVFileBusy, KVFileError, KVFileFull

SUFFIX: Final = ".flushed"
_PART: Final = ".flushed.part"
#: The header starts with magic, format and state. Checksums and the number of flushes follow, then
#: what identifies the cache: sizes, layout, shape, model and build.
_BEGIN: Final = struct.Struct("<8sII")
_GENERATION: Final = slice(40, 48)
_IDENTITY: Final = slice(48, 472)
_MODEL: Final = slice(216, 344)
_MAGIC: Final = b"llama-kv"
_CLEAN: Final = 0xC33CC33C
#: Bytes that are copied at a time, and the size of holes.
_CHUNK: Final = 1 << 16
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the existing files of a kept cache, NAME and NAME.1 for example."""
    found: list[Path] = []
    each = Path(path)
    while each.is_file():
        found.append(each)
        each = Path(f"{os.fspath(path)}.{len(found)}")
    return found


def write(path: str | os.PathLike[str]) -> None:
    """Copy the flushed files of a cache, unless their copies are of the same flush.

    All copies are complete before the first one replaces an older one. Raises KVFileFull, or
    KVFileError; the older copies remain.
    """
    stale = [each for each in files(path) if _header(each) != _header(_copy(each))]
    parts = [each.with_name(each.name + _PART) for each in stale]
    try:
        for source, part in zip(stale, parts, strict=True):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with ExitStack() as stack:
                target = _opened(stack, part, flags)
                _copy_data(_opened(stack, source, os.O_RDONLY | os.O_CLOEXEC), target, 0)
                os.fsync(target)
        for source, part in zip(stale, parts, strict=True):
            part.replace(_copy(source))
        if stale:
            _sync_directory(Path(path).parent)
    except OSError as error:
        what = "the cache is flushed, and a kill before the next flush would lose it"
        raise _failed(path, error, what) from error
    finally:
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the copies of a cache whose content was discarded."""
    for each in files(path):
        with suppress(OSError):
            _copy(each).unlink(missing_ok=True)


def restore(path: str | os.PathLike[str]) -> bool:
    """Copy the last flush back into the files of a cache that a killed process left dirty.

    Return False, with nothing changed, if there are no copies of one flush of this cache. Raises
    KVFileBusy if the cache has an owner, KVFileFull, or KVFileError.
    """
    found = files(path)
    headers = [(_header(each), _header(_copy(each))) for each in found]
    flushes = {copy[_GENERATION] for _, copy in headers}
    fits = all(_clean(copy) and copy[_IDENTITY] == own[_IDENTITY] for own, copy in headers)
    if not found or not fits or len(flushes) != 1:
        return False
    with ExitStack() as stack:
        try:
            for each in found:
                target = _opened(stack, each, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
                source = _opened(stack, _copy(each), os.O_RDONLY | os.O_CLOEXEC)
                # The state comes last: until then, the file stays dirty.
                _copy_data(source, target, _BEGIN.size)
                os.fsync(target)
                os.pwrite(target, os.pread(source, _BEGIN.size, 0), 0)
                os.fsync(target)
        except BlockingIOError as error:
            msg = f"{path} is in use by another context or process; close that one first"
            raise KVFileBusy(msg) from error
        except OSError as error:
            raise _failed(path, error, "its last flush could not be restored") from error
    return True


def kept_for(path: str | os.PathLike[str]) -> str | None:
    """Return the text that names the model of a kept cache; None if the file is none."""
    header = _header(Path(path))
    if len(header) < _IDENTITY.stop or not header.startswith(_MAGIC):
        return None
    return header[_MODEL].partition(b"\0")[0].decode("utf-8", "replace") or None


def _copy(file: Path) -> Path:
    return file.with_name(file.name + SUFFIX)


def _header(file: Path) -> bytes:
    """Return the header of a file, or nothing if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(_IDENTITY.stop)
    except OSError:
        return b""


def _clean(header: bytes) -> bool:
    if len(header) < _IDENTITY.stop:
        return False
    magic, _, state = _BEGIN.unpack_from(header)
    return bool(magic == _MAGIC and state == _CLEAN)


def _opened(stack: ExitStack, path: Path, flags: int) -> int:
    handle = os.open(path, flags, 0o600)
    stack.callback(os.close, handle)
    return handle


def _copy_data(source: int, target: int, start: int) -> None:
    """Make a file equal to another one from a position; zeros of a new file stay holes."""
    size = os.fstat(source).st_size
    new = os.fstat(target).st_size == 0
    at = start
    while at < size:
        if new:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # the rest is a hole
        chunk = os.pread(source, _CHUNK, at)
        if not chunk:
            raise OSError(errno.EIO, "the file is shorter than it was")
        # Also where the source has a hole: the checksums include free cells between used ones.
        if chunk != os.pread(target, len(chunk), at).ljust(len(chunk), b"\0"):
            written = 0
            while written < len(chunk):
                written += os.pwrite(target, chunk[written:], at + written)
        at += len(chunk)
    os.ftruncate(target, size)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(path: str | os.PathLike[str], error: OSError, what: str) -> KVFileError:
    if error.errno in _FULL:
        msg = f"{os.fspath(path)}: {error.strerror}; {what}: free space, then flush again"
        return KVFileFull(msg)
    return KVFileError(f"{os.fspath(path)}: {error.strerror or error}; {what}")
