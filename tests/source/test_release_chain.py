"""Test the chain of releases: git's tools work across archives with one commit each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, imported, isolate, refs

from pyllamakv.errors import SourceError
from pyllamakv.source import git_command, lockfile, release_chain
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store in its own data directory."""
    isolate(tmp_path, monkeypatch)
    return open_store()


def three(store: Store) -> list[Release]:
    """Return three releases, newest first."""
    texts = {"0.10": "c old", "0.9": "b old new", "0.2": "a old"}
    dates = {"0.2": "2024", "0.9": "2025", "0.10": "2026"}
    return [
        imported(
            store, name, TREE | {"src/llama.cpp": text.encode()}, f"{dates[name]}-01-01T00:00:00Z"
        )
        for name, text in texts.items()
    ]


def test_releases_are_chained_by_date(store: Store) -> None:
    """Each release is a commit of its tree whose parent is the previous release."""
    line = release_chain.chain(store, three(store))
    assert [link.release.name for link in line] == ["0.2", "0.9", "0.10"]
    assert store.parents(line[0].commit) == []
    for older, newer in itertools.pairwise(line):
        assert store.parents(newer.commit) == [older.commit]
    assert [store.tree_of(link.commit) for link in line] == [link.release.tree for link in line]
    assert refs(store)["refs/line/0.10"] == line[-1].commit


@pytest.mark.slow
def test_chain_is_the_same_in_any_store_and_order(store: Store, tmp_path: Path) -> None:
    """The same releases give the same commits in any store, in any order."""
    releases = three(store)
    other = open_store(tmp_path / "other.git")
    again = three(other)
    assert release_chain.chain(store, releases) == release_chain.chain(other, reversed(again))


def test_default_chain_contains_the_fetched_releases(store: Store) -> None:
    """Without arguments, the chain contains the locked releases that the store has."""
    releases = three(store)
    lockfile.save(lockfile.added(), releases)
    assert [link.release.name for link in release_chain.chain(store)] == ["0.2", "0.9", "0.10"]
    store.delete_ref("refs/upstream/0.9")
    assert [link.release.name for link in release_chain.chain(store)] == ["0.2", "0.10"]
    assert "refs/line/0.9" not in refs(store)


def test_git_bisect_and_pickaxe_work_on_the_chain(store: Store) -> None:
    """Git bisect finds the release that added a word, and log -S those that changed it."""
    line = release_chain.chain(store, three(store))
    found = release_chain.pickaxe(store, "new", ["src"], line=line)
    assert [release.name for release in found] == ["0.9", "0.10"]
    words = ["bisect", "start", "--no-checkout", line[-1].commit, line[0].commit]
    git_command.git(store.path, *words)
    script = 'test "$(git cat-file blob BISECT_HEAD:src/llama.cpp | cut -c1)" != c'
    output = git_command.git(store.path, "bisect", "run", "sh", "-c", script)
    git_command.git(store.path, "bisect", "reset", check=False)
    assert f"{line[-1].commit} is the first bad commit" in output


def test_empty_chain_error_names_the_fetch_command(store: Store) -> None:
    """Without a release, the error has a remedy."""
    assert release_chain.chain(store) == []
    with pytest.raises(SourceError, match="upstream fetch"):
        release_chain.pickaxe(store, "x")
