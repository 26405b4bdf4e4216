"""Create archives that must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from source_kit import (
    TREE,
    objects,
    pack,
    refs,
)

from pyllamakv.errors import ArchiveError
from pyllamakv.source import fetch
from pyllamakv.source.sdist_import import import_sdist
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

BUNDLE = "package/llama/gitRelease.bundle"
UNPACKED = "llama_cpp_python-1.0/vendor/llama.cpp"
PLAIN = {f"{UNPACKED}/{name}": data for name, data in TREE.items()}


def sdist(folder: Path, members: dict[str, Any]) -> Path:
    return pack(folder / "llama_cpp_python-1.0.tar.gz", members)


def refused(store: Store, file: Path, words: str) -> None:
    """Check that an archive is refused, and that the store is unchanged."""
    before = objects(store)
    with pytest.raises(ArchiveError, match=words):
        import_sdist(store, file)
    assert objects(store) == before
    assert not refs(store)
    assert not list(store.path.glob("tmp-*"))


def not_fetched(spec: str, words: str) -> None:
    """Check that a source is refused, and that the store is unchanged."""
    store = open_store()
    before = objects(store)
    with pytest.raises(ArchiveError, match=words):
        fetch.add(spec)
    assert objects(store) == before
    assert not refs(store)
    assert not (store.path / "shallow").exists()
    assert not list(store.path.glob("tmp-*"))
