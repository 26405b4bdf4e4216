"""Identify models by a digest of the file's header and of samples of its tensors.

The header has hyperparameters, vocabulary, and names, shapes and types of all tensors. A model that
was trained further has the same header. Therefore, evenly spaced blocks of the weights are in the
digest too.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import Untestable, UsageError
from pyllamakv.home import home
from pyllamakv.models import catalog
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from typing import BinaryIO

#: Number of bytes at the start that are digested completely: nearly every header is shorter.
HEADER = 1 << 20
#: Number and length of the blocks after it.
BLOCKS, BLOCK = 64, 4096


def identity(path: Path) -> str:
    """Return the digest of a model file; reads a few megabytes at most."""
    try:
        facts = path.stat()
        return _digest(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        msg = f"the model file {path} cannot be read: {error.strerror}"
        raise UsageError(msg) from error


@lru_cache(maxsize=64)
def _digest(path: Path, size: int, _changed: int) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        found.update(size.to_bytes(8, "little"))
        for start, length in _places(size):
            found.update(_read(file, start, length))
    return found.hexdigest()[:32]


def name(path: Path) -> str:
    """Return the name of a generated or fetched model in the data directory, else the path."""
    if path.resolve().parent == (home() / "models").resolve():
        for pinned in catalog.known().values():
            if path.name == pinned.path.name:
                return pinned.name
        for shape in synthetic_models.SHAPES.values():
            if path.name == f"{shape.name}-{shape.digest}.gguf":
                return shape.name
    return str(path)


def find(recorded: str, digest: str) -> Path:
    """Return the file of a recorded model: its former path, or PYLLAMAKV_TEST_MODEL.

    Raises UsageError if neither exists, NotFetched for a model of the package index. The digest of
    the file is not checked here.
    """
    try:
        return synthetic_models.model(recorded)
    except UsageError as error:
        if recorded in synthetic_models.SHAPES:  # its file could not be written
            raise
        try:
            named = synthetic_models.model(synthetic_models.TEST)
        except (Untestable, UsageError):
            named = None
        if named is not None and identity(named) == digest:
            return named
        by = f"--model, or by {synthetic_models.VARIABLE}"
        msg = f"the model was not found: {recorded}; name it with {by}"
        raise UsageError(msg) from error


def _places(size: int) -> list[tuple[int, int]]:
    rest = size - HEADER
    if rest <= BLOCKS * BLOCK:
        return [(0, size)]
    step = (rest - BLOCK) // (BLOCKS - 1)
    return [(0, HEADER), *((HEADER + step * n, BLOCK) for n in range(BLOCKS))]


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
