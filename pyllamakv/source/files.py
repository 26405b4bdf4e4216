"""Write files atomically, and lock files against other writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from pyllamakv.errors import DiskFailed, DiskFull, GitError, Locked, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Timeout of a lock in seconds: only a hanging process holds one longer.
LOCK_SECONDS = 900


@contextlib.contextmanager
def locked(file: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a file lock of the data directory.

    Raises Locked, naming the file, when another process keeps it, and UsageError when the
    data directory cannot be written.
    """
    try:
        with translate_disk_errors(file), translate_permission_errors(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            held = filelock.FileLock(file).acquire(timeout=seconds)
    except filelock.Timeout as error:
        msg = f"another process has held {file} for {seconds:.0f} s; end it, then try again"
        raise Locked(msg) from error
    with held:
        yield


@contextlib.contextmanager
def inheritable_lock(file: Path) -> Iterator[int]:
    """Lock a file through a descriptor that child processes may inherit; yield the descriptor.

    Children of a killed process continue to write, so the lock lasts until the last process that
    inherited it has ended.
    """
    with translate_disk_errors(file):
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def write_text_atomic(file: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old text or the new one."""
    write_bytes_atomic(file, text.encode())


def write_bytes_atomic(file: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it; the old content remains until then.

    The temporary name is fixed, so that the next write replaces the file of a killed process.
    """
    part = file.with_name(f".{file.name}.part")
    with translate_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = _own(part)
        try:
            with os.fdopen(os.dup(handle), "wb") as out:
                out.write(data)
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


def _own(part: Path) -> int:
    """Create an empty file for this process, waiting for other writers.

    The file is always new: an existing entry of this name could be a planted link to a file of the
    user.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if _lock(handle, part):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        _remove_left(part)


def _remove_left(part: Path) -> None:
    """Delete a stale ``.part`` file after its writer has released the lock.

    Raises SourceError for a directory.
    """
    with contextlib.suppress(FileNotFoundError):
        facts = part.lstat()
        if stat.S_ISDIR(facts.st_mode):
            msg = f"{part} is a directory in the place of a file; remove it"
            raise SourceError(msg)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            part.unlink()
            return
        handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _lock(handle, part):
                part.unlink()
        finally:
            os.close(handle)


def _lock(handle: int, part: Path) -> bool:
    """Wait for the lock of an open file; return whether its name still refers to it.

    The previous holder may have renamed or removed the file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return os.path.samestat(os.fstat(handle), part.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def translate_permission_errors(folder: Path) -> Iterator[None]:
    """Raise UsageError for a data directory without write permission or below a file."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        msg = (
            f"{folder} cannot be written: {error.strerror}; set PYLLAMAKV_HOME to a writable "
            f"directory"
        )
        raise UsageError(msg) from error


@contextlib.contextmanager
def translate_disk_errors(place: Path) -> Iterator[None]:
    """Translate disk errors of Python and git below ``place`` to DiskFull or DiskFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            msg = f"the disk is full at {place}: {error.strerror}; free space or set PYLLAMAKV_HOME"
            raise DiskFull(msg) from error
        if error.errno in (errno.EIO, errno.EROFS):
            msg = f"cannot write {place}: {error.strerror}; see the system log"
            raise DiskFailed(msg) from error
        raise
    except GitError as error:
        if "No space left" in error.output or "quota exceeded" in error.output:
            msg = f"the disk is full at {place}; free space or set PYLLAMAKV_HOME"
            raise DiskFull(msg) from error
        raise
