"""Work that leaks in one way each, and some that does not, for the trials of leaks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

_KEPT: list[bytes] = []


def steady(variant: Path, folder: Path) -> Iterator[int]:
    """Take and give back."""
    while True:
        _ = [bytes(4096) for _ in range(50)]
        yield 50


def growing(variant: Path, folder: Path) -> Iterator[int]:
    """Keep a little of everything."""
    while True:
        for _ in range(50):
            _KEPT.append(bytes(4096))
        yield 50


def descriptors(variant: Path, folder: Path) -> Iterator[int]:
    """Forget to close, now and then."""
    while True:
        if not len(_KEPT) % 40 and len(_KEPT) < 4000:
            os.open(os.devnull, os.O_RDONLY)
        _KEPT.append(b"")
        yield 50


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
