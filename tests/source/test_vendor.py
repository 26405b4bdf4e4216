"""Test vendored trees: export, record, comparison and removal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from source_kit import TREE, imported, isolate

from pyllamakv.errors import SourceError, UnknownRelease
from pyllamakv.source import vendor
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pyllamakv.source.releases import Release


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store in its own data directory."""
    isolate(tmp_path, monkeypatch)
    return open_store()


@pytest.fixture
def release(store: Store) -> Release:
    """Return a tiny release that is in the store."""
    return imported(store, "0.3.9", TREE, "2025-01-01T00:00:00Z")


def test_synced_tree_is_recorded_and_verified(store: Store, release: Release) -> None:
    """A tree is exported with a record, and is found unchanged."""
    vendored, done = vendor.sync(store, release, release.commit, spec="0.3.9")
    assert done.written == len(TREE)
    assert vendor.listed() == [vendored]
    assert vendor.find("0.3.9") == vendored
    assert Path(vendored.folder) == vendor.trees() / "0.3.9"
    assert not vendor.verify(store, vendored)
    (Path(vendored.folder) / "stray").write_text("x")
    assert vendor.verify(store, vendored).lines() == ["stray stray"]


def test_stock_and_patched_have_directories_of_their_own(store: Store, release: Release) -> None:
    """Each series has its own directory."""
    child, _ = store.commit(release.commit, {"new": b"x"}, "patch")
    vendor.sync(store, release, release.commit, spec="0.3.9")
    vendor.sync(store, release, child, spec="0.3.9+patched", series=None)
    vendor.sync(store, release, child, spec="0.3.9+a,b", series=("a", "b"))
    names = [Path(v.folder).name for v in vendor.listed()]
    assert names == ["0.3.9", "0.3.9+a,b", "0.3.9+patched"]
    assert vendor.find("0.3.9+a,b").series == ("a", "b")
    assert vendor.find("0.3.9+patched").series is None


def test_tree_in_another_directory_is_not_listed(
    store: Store, release: Release, tmp_path: Path
) -> None:
    """A tree elsewhere belongs to the caller and is not listed."""
    out = tmp_path / "mine"
    vendor.sync(store, release, release.commit, spec="0.3.9", folder=out)
    assert (out / "include/llama.h").is_file()
    assert vendor.listed() == []


def test_unknown_spec_and_missing_directory_have_a_remedy(store: Store, release: Release) -> None:
    """The error of an unknown spec has the known ones; that of a missing directory, a command."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    with pytest.raises(UnknownRelease, match=r"there is: 0\.3\.9"):
        vendor.find("0.4")
    vendor.clean(vendored)
    assert vendor.listed() == []
    with pytest.raises(SourceError, match="upstream sync"):
        vendor.verify(store, vendored)


def test_clean_removes_only_trees_in_the_data_directory(
    store: Store, release: Release, tmp_path: Path
) -> None:
    """A directory elsewhere is never removed."""
    out = tmp_path / "mine"
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9", folder=out)
    with pytest.raises(SourceError, match="manually"):
        vendor.clean(vendored)
    assert out.is_dir()


@pytest.mark.slow
@pytest.mark.regression(
    "`vendor clean` removed a tree that a running `vendor sync` was writing",
    by="faults",
    of="Python",
)
def test_clean_waits_for_a_running_sync(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean` waits for a `sync` that runs in the same directory."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    ended = threading.Event()

    def clean() -> None:
        vendor.clean(vendored)
        ended.set()

    thread = threading.Thread(target=clean)
    real = Store.export

    def export(*words: Any, **more: Any) -> Any:
        thread.start()
        assert not ended.wait(0.3)
        return real(*words, **more)

    monkeypatch.setattr(Store, "export", export)
    vendor.sync(store, release, release.commit, spec="0.3.9")
    thread.join()
    assert not Path(vendored.folder).exists()
    assert vendor.listed() == []


@pytest.mark.regression(
    "a repeated `vendor sync` removed the record of the tree, so that a concurrent one did not "
    "find it",
    by="faults",
    of="Python",
)
def test_repeated_sync_keeps_the_tree_available(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may sync the same tree concurrently, and no old record remains."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    found: list[list[vendor.Vendored]] = []
    real = Store.export

    def export(*words: Any, **more: Any) -> Any:
        found.append(vendor.listed())
        return real(*words, **more)

    monkeypatch.setattr(Store, "export", export)
    vendor.sync(store, release, release.commit, spec="0.3.9")
    other = imported(store, "0.3.10", TREE | {"more.c": b"int more;\n"}, "2025-02-01T00:00:00Z")
    vendor.sync(store, release, other.commit, spec="0.3.9")
    assert found == [[vendored], []]
    assert vendor.find("0.3.9").commit == other.commit


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.regression(
    "a tree whose export was killed early was treated as a directory with files of the user",
    by="faults",
    of="Python",
)
def test_sync_replaces_the_tree_of_a_killed_export(
    store: Store, release: Release, whole: bool
) -> None:
    """The incomplete export is replaced."""
    folder = vendor.trees() / "0.3.9"
    if whole:
        vendor.sync(store, release, release.commit, spec="0.3.9")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "..pyllamakv-tree.part").write_text("half")
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    assert not vendor.verify(store, vendored)


@pytest.mark.regression(
    "a killed `vendor clean` left a partial tree, which was treated as files of the user",
    by="faults",
    of="Python",
)
def test_sync_removes_the_tree_of_a_killed_clean(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial tree does not block, and the next sync removes it."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", killed)
        vendor.clean(vendored)
    assert len(list(vendor.trees().iterdir())) == 1
    again, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    assert not vendor.verify(store, again)
    vendor.clean(again)
    assert list(vendor.trees().iterdir()) == []


@pytest.mark.regression(
    "records of vendored trees and rebases that are JSON of another structure raised untyped "
    "errors",
    by="hostile input",
    of="Python",
)
def test_damaged_records_count_as_absent(store: Store, release: Release) -> None:
    """A record that cannot be read, or belongs to another directory, is ignored."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    record = vendor.trees() / "0.3.9.json"
    (vendor.trees() / "other.json").write_text(record.read_text())
    facts = record.read_text()
    for damage in ("{", "1", "null", "[" * 100_000, facts.replace(f'"{vendored.folder}"', "1")):
        (vendor.trees() / "bad.json").write_text(damage)
        assert vendor.listed() == [vendored]
