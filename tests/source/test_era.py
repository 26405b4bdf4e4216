"""Test that eras are detected from the content of files, not from a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.home import data, home
from pyllamakv.source import lockfile
from pyllamakv.source.era import ERAS, UNKNOWN, detect
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

#: For each era, the files that identify it, reduced to the significant lines.
TREES = {
    "monolith": {"src/llama.cpp": "llama_kv_cache_find_slot do_defrag"},
    "split": {
        "src/llama-kv-cache.cpp": "llama_kv_cache_find_slot",
        "src/llama-kv-cache.h": "do_defrag",
    },
    "context": {
        "src/llama-kv-cache.cpp": "defrag_prepare llama_memory_i",
        "src/llama-context.cpp": "kv_self->defrag_prepare(",
    },
    "unified": {
        "src/llama-kv-cache.cpp": "defrag_prepare llama_memory_i",
        "src/llama-context.cpp": "kv_self_update",
    },
    "memory": {
        "src/llama-kv-cache-unified.cpp": "defrag_prepare llama_memory_i",
        "include/llama.h": "llama_get_memory",
    },
    "streams": {
        "src/llama-kv-cache-unified.h": "n_stream defrag_prepare llama_memory_i",
        "include/llama.h": "llama_get_memory",
    },
    "rows": {
        "src/llama-kv-cache.cpp": "n_stream llama_memory_i",
        "include/llama.h": "llama_get_memory",
    },
    UNKNOWN: {"src/llama-kv-cache.cpp": "nothing that is known"},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store."""
    return open_store(tmp_path / "store.git")


@pytest.mark.parametrize("era", TREES)
def test_era_is_detected_from_the_sources(store: Store, era: str) -> None:
    """A tree with the marks of an era has that era."""
    files: dict[str, bytes | None] = {k: v.encode() for k, v in TREES[era].items()}
    _, tree = store.commit(None, files, era)
    assert detect(store, tree) == era


def test_oldest_layout_is_monolith_and_other_trees_are_unknown(store: Store) -> None:
    """The monolith is found at the root too, and the era of any other tree is unknown."""
    commit, _ = store.commit(None, {"llama.cpp": b"llama_kv_cache_find_slot"}, "m")
    assert detect(store, commit) == "monolith"
    commit, _ = store.commit(None, {"README": b"x"}, "m")
    assert detect(store, commit) == UNKNOWN


def test_fetched_releases_have_the_era_of_the_lock() -> None:
    """Each fetched reference release has the era of the lock."""
    if not (home() / "store.git").is_dir():
        pytest.skip("no release is fetched here")
    store = open_store()
    there = [r for r in lockfile.load(data("vendor/upstream.lock.toml")) if store.has(r)]
    if not there:
        pytest.skip("no release is fetched here")
    assert {r.name: detect(store, r) for r in there} == {r.name: r.era for r in there}
    assert {r.era for r in there} <= set(ERAS)
