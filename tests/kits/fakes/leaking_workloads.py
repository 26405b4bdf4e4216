"""Workloads with one leak each, and some without, for the leak tests."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_KEPT: list[bytes] = []


def steady(variant: Path, folder: Path) -> Iterator[int]:
    """Allocate and free."""
    while True:
        _ = [bytes(4096) for _ in range(50)]
        yield 50


def growing(variant: Path, folder: Path) -> Iterator[int]:
    """Leak a little of everything."""
    while True:
        for _ in range(50):
            _KEPT.append(bytes(4096))
        yield 50


def descriptors(variant: Path, folder: Path) -> Iterator[int]:
    """Forget to close files sometimes."""
    while True:
        if not len(_KEPT) % 40 and len(_KEPT) < 4000:
            os.open(os.devnull, os.O_RDONLY)
        _KEPT.append(b"")
        yield 50


def mappings(variant: Path, folder: Path) -> Iterator[int]:
    """Forget to unmap, as a context over a file might: one page of it at each operation."""
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_ssize_t
    (folder / "cache").write_bytes(bytes(4096))
    for _ in range(1000):
        with (folder / "cache").open("r+b") as file:
            found = libc.mmap(0, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert found != -1
        yield 1


def threads(variant: Path, folder: Path) -> Iterator[int]:
    """Start threads that never end."""
    while True:
        if not len(_KEPT) % 40 and len(_KEPT) < 2000:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        _KEPT.append(b"")
        yield 50


def breaking(variant: Path, folder: Path) -> Iterator[int]:
    """Fail."""
    yield 1
    raise ValueError("broken")
