"""Write files so that nobody sees half of one, and wait for others who write them."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from pyllamakv.errors import DiskFull, GitError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Only a process that hangs holds a lock longer than this; waiting for ever would hide it.
LOCK_SECONDS = 900


@contextlib.contextmanager
def locked(file: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a file lock. Raises SourceError, naming the file, when another process keeps it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = filelock.FileLock(file).acquire(timeout=seconds)
    except filelock.Timeout as error:
        msg = f"another process has held {file} for {seconds:.0f} s; end it, then try again"
        raise SourceError(msg) from error
    with held:
        yield


def write_atomic(file: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old text or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with disk_room(file):
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as out:
                out.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def disk_room(place: Path) -> Iterator[None]:
    """Turn "no room left" below ``place``, from Python or from git, into DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            msg = f"no room left at {place}: {error.strerror}; make room or set PYLLAMAKV_HOME"
            raise DiskFull(msg) from error
        raise
    except GitError as error:
        if "No space left" in error.output or "quota exceeded" in error.output:
            msg = f"no room left at {place}; make room or set PYLLAMAKV_HOME"
            raise DiskFull(msg) from error
        raise
