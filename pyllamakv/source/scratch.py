"""Lend folders that go when their user ends, also when it is killed.

Who works in one holds a lock on it. So what a killed process left can be told by that, and not by
its age: clocks jump.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyllamakv.source.files import disk_room

_PREFIX = "tmp-"


@contextlib.contextmanager
def lent(parent: Path) -> Iterator[Path]:
    """Lend a folder below ``parent``, and remove those that nobody works in any more."""
    for old in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = _taken(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                shutil.rmtree(old)
            finally:
                os.close(handle)
    with disk_room(parent):
        folder, handle = _made(parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _made(parent: Path) -> tuple[Path, int]:
    """Make a folder and lock it; one that was taken for an old one meanwhile is gone."""
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
