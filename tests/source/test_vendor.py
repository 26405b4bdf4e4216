"""Vendored trees: put in place, recorded, compared, removed."""

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
    """Return an empty store in a home of its own."""
    isolate(tmp_path, monkeypatch)
    return open_store()


@pytest.fixture
def release(store: Store) -> Release:
    """Return a tiny release that the store has."""
    return imported(store, "0.3.9", TREE, "2025-01-01T00:00:00Z")


def test_sync_and_verify(store: Store, release: Release) -> None:
    """A tree is put in place with a record, and found unchanged."""
    vendored, done = vendor.sync(store, release, release.commit, spec="0.3.9")
    assert done.written == len(TREE)
    assert vendor.listed() == [vendored]
    assert vendor.find("0.3.9") == vendored
    assert Path(vendored.folder) == vendor.trees() / "0.3.9"
    assert not vendor.verify(store, vendored)
    (Path(vendored.folder) / "stray").write_text("x")
    assert vendor.verify(store, vendored).lines() == ["stray stray"]


def test_stock_and_patched_have_directories_of_their_own(store: Store, release: Release) -> None:
    """Each series has a folder of its own."""
    child, _ = store.commit(release.commit, {"new": b"x"}, "patch")
    vendor.sync(store, release, release.commit, spec="0.3.9")
    vendor.sync(store, release, child, spec="0.3.9+patched", series=None)
    vendor.sync(store, release, child, spec="0.3.9+a,b", series=("a", "b"))
    names = [Path(v.folder).name for v in vendor.listed()]
    assert names == ["0.3.9", "0.3.9+a,b", "0.3.9+patched"]
    assert vendor.find("0.3.9+a,b").series == ("a", "b")
    assert vendor.find("0.3.9+patched").series is None


def test_another_folder_has_no_record(store: Store, release: Release, tmp_path: Path) -> None:
    """A tree put elsewhere is the caller's: it is not listed."""
    out = tmp_path / "mine"
    vendor.sync(store, release, release.commit, spec="0.3.9", folder=out)
    assert (out / "include/llama.h").is_file()
    assert vendor.listed() == []


def test_unknown_spec_and_missing_directory_have_a_remedy(store: Store, release: Release) -> None:
    """An unknown spec lists the known ones; a missing folder has the command to restore it."""
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
    """A folder elsewhere is never removed."""
    out = tmp_path / "mine"
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9", folder=out)
    with pytest.raises(SourceError, match="manually"):
        vendor.clean(vendored)
    assert out.is_dir()


@pytest.mark.slow
@pytest.mark.regression(
    "`vendor clean` removed a tree that a `vendor sync` was filling",
    by="faults",
    of="Python",
)
def test_clean_waits_for_a_running_sync(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean` waits for a `sync` that is running in the same folder."""
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
    "a `vendor sync` of a tree in place took its record away meanwhile, so that a second one did "
    "not find it",
    by="faults",
    of="Python",
)
def test_repeated_sync_keeps_the_tree_available(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may sync the same tree one after the other, and no old record remains."""
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
    "a tree whose export was killed early passed for a folder with files of the user, and could "
    "not be written",
    by="faults",
    of="Python",
)
def test_a_tree_that_a_killed_export_left(store: Store, release: Release, whole: bool) -> None:
    """What it had not finished is taken over, and goes."""
    folder = vendor.trees() / "0.3.9"
    if whole:
        vendor.sync(store, release, release.commit, spec="0.3.9")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "..pyllamakv-tree.part").write_text("half")
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    assert not vendor.verify(store, vendored)


@pytest.mark.regression(
    "a `vendor clean` that was killed left half a tree, which then passed for files of the user",
    by="faults",
    of="Python",
)
def test_a_clean_that_was_killed(
    store: Store, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial tree blocks nothing, and the next sync removes it."""
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
    "records of vendored trees and waiting rebases that are JSON of another shape were bare "
    "errors of Python",
    by="hostile input",
    of="Python",
)
def test_damaged_records_count_as_absent(store: Store, release: Release) -> None:
    """A record that cannot be read, or that belongs to another folder, is ignored."""
    vendored, _ = vendor.sync(store, release, release.commit, spec="0.3.9")
    record = vendor.trees() / "0.3.9.json"
    (vendor.trees() / "other.json").write_text(record.read_text())
    facts = record.read_text()
    for damage in ("{", "1", "null", "[" * 100_000, facts.replace(f'"{vendored.folder}"', "1")):
        (vendor.trees() / "bad.json").write_text(damage)
        assert vendor.listed() == [vendored]
