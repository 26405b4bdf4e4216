"""Append rows to a trace so that whatever ends the process leaves a file that can be read.

Rows are written whole, many at a time, without a buffer in between. What could be written only in
part, on a full disk, is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from pyllamakv.errors import DiskFull, ScriptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: What the system says when there is no room: on the disk, in a quota, for one file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check(path: Path) -> None:
    """Raise UsageError where no trace can be written: before a long search, not after it."""
    new = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise _refused(path, error) from error
    if new:
        path.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be written: {error.strerror}; name a file in a folder of yours"
    )


def _opened(path: Path) -> int:
    """Open an empty file for one writer; BlockingIOError when it has one."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


class TraceFile:
    """Write lines to a new file at ``path``, which replaces what was there."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises UsageError where that cannot be or another writes, DiskFull."""
        self.path = path
        self._size = 0
        try:
            self._handle = _opened(path)
        except BlockingIOError as error:
            msg = f"{path} is being recorded by another; wait for it, or name another file"
            raise UsageError(msg) from error
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error) from error
            raise _refused(path, error) from error

    @property
    def closed(self) -> bool:
        """Tell whether nothing more is written."""
        return self._handle < 0

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, all or none of them. Raises DiskFull, or ScriptError for other faults."""
        if not lines:
            return
        data = memoryview(("\n".join(lines) + "\n").encode())
        left = data
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
                os.lseek(self._handle, self._size, os.SEEK_SET)
            if error.errno in _FULL:
                raise self._full(error) from error
            msg = f"{self.path} cannot be written: {error.strerror}; it has the rows before"
            raise ScriptError(msg) from error
        self._size += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _full(self, error: OSError) -> DiskFull:
        return DiskFull(
            f"no room left for the trace {self.path}: {error.strerror}; it ends with the last "
            "rows that fitted, and what was recorded goes on unrecorded; make room and record again"
        )
