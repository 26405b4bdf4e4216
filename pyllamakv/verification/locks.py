"""Let the processes of one home share work; a killed process keeps nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import filelock

from pyllamakv.home import home

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.source.progress import Progress


@contextlib.contextmanager
def claim(name: str | None, *, wait: bool) -> Iterator[bool]:
    """Lend the cell of a key to one process of this home at a time.

    False, where another process has it and ``wait`` is not set. A killed process has nothing.
    """
    if name is None:
        yield True
        return
    folder = home() / "locks"
    lock = filelock.FileLock(folder / f"cell-{name[:16]}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        yield False
        return
    except OSError:
        # A home that cannot be written remembers nothing either.
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def one_builder(progress: Progress | None) -> Iterator[None]:
    """Let one cell of this machine fetch and build at a time: a build takes every processor."""
    folder = home() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "matrix.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if progress:
                progress("waiting for the build of another cell", 0, None)
            lock.acquire()
    except OSError:
        # A home that cannot be written may hold all that is needed; `check` says if it does not.
        yield
        return
    try:
        yield
    finally:
        lock.release()
