"""Name and find the model of a trace, and identify it by the digest of its files."""

from __future__ import annotations

from pathlib import Path

from pyllamakv import content_digest
from pyllamakv.errors import ModelError, Untestable, UsageError
from pyllamakv.home import home
from pyllamakv.models import catalog
from pyllamakv.runtime.gguf_file import check_file
from pyllamakv.scenarios import synthetic_models


def identity(path: Path) -> str:
    """Return the digest of a model's files. Raises UsageError if they cannot be read."""
    try:
        return content_digest.compute(check_file(path).records)
    except ModelError as error:
        raise UsageError(str(error)) from error


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
