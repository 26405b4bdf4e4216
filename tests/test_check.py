"""Checking the store: damage and lies are found, whole releases are good."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, imported, isolate

from pyllamakv.source.check import problems
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store in a home of its own."""
    isolate(tmp_path, monkeypatch)
    return open_store()


def test_a_whole_release_is_good(store: Store) -> None:
    """Nothing is said about a release that is what the lock says."""
    assert problems(store, imported(store, "1.0", TREE, "2025")) == []


def test_lies_are_named(store: Store) -> None:
    """Another commit, tree or era than in the lock is named."""
    release = imported(store, "1.0", TREE, "2025")
    assert "1" * 40 in problems(store, replace(release, commit="1" * 40))[0]
    assert "2" * 40 in problems(store, replace(release, tree="2" * 40))[0]
    assert "monolith" in problems(store, replace(release, era="rows"))[0]
    assert problems(store, replace(release, name="2.0")) == ["not fetched"]


def test_damage_is_found(store: Store) -> None:
    """An object that is gone, or that was overwritten, is found."""
    release = imported(store, "1.0", TREE, "2025")
    entry = store.entries(release, "include/llama.h")[0]
    other = store.entries(release, "src/llama.cpp")[0]
    folder = store.path / "objects"
    file = folder / entry.blob[:2] / entry.blob[2:]
    whole = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes((folder / other.blob[:2] / other.blob[2:]).read_bytes())
    assert "damaged" in problems(store, release)[0]
    file.unlink()
    assert problems(store, release) != []
    file.write_bytes(whole)
    assert problems(store, release) == []
