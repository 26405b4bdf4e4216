"""Test the store: a bare repository that is read and extended in the same way everywhere."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, imported, repository

from pyllamakv.errors import DiskFull, GitError, SourceError
from pyllamakv.source import git_command
from pyllamakv.source.files import locked, translate_disk_errors, write_text_atomic
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store."""
    return open_store(tmp_path / "home" / "store.git")


def test_open_twice_gives_the_same_store(tmp_path: Path) -> None:
    """The first call creates the store; the second one finds its content."""
    path = tmp_path / "store.git"
    commit, _ = open_store(path).commit(None, {"f": b"x"}, "m")
    assert open_store(path).read(commit, "f") == b"x"


def test_concurrent_opens_create_one_store(tmp_path: Path) -> None:
    """Concurrent calls create one complete store."""
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: open_store(tmp_path / "store.git"), range(8)))
    assert all(s.commit(None, {"f": b"x"}, "m") for s in stores)


def test_default_store_is_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path, the store is below the data directory."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "h"))
    assert open_store().path == tmp_path / "h" / "store.git"


def test_files_of_a_commit_are_read_and_listed(store: Store) -> None:
    """Files are read and listed by path; an absent one is None."""
    commit, tree = store.commit(None, {"src/a.c": b"a", "src/b/c.h": b"\xff\r\n", "x": b""}, "m")
    assert store.ls(commit) == ["src/a.c", "src/b/c.h", "x"]
    assert store.ls(tree, "src") == store.ls(tree, "src/") == ["src/a.c", "src/b/c.h"]
    assert store.ls(tree, "sr") == []
    assert store.read(tree, "src/b/c.h") == b"\xff\r\n"
    found = store.read_many(commit, ["x", "src", "none", "src/a.c"])
    assert found == {"x": b"", "src": None, "none": None, "src/a.c": b"a"}
    assert store.read_text(commit, "none") == ""


@pytest.mark.regression(
    "files of a tree with a newline or a carriage return in their name could not be read, or were"
    " confused",
    by="hostile input",
    of="Python",
)
def test_paths_with_special_characters_survive(store: Store) -> None:
    """Paths may contain spaces, quotes and non-ASCII letters."""
    files = {
        'a "b" c': b"1",
        "ä/ö.txt": b"2",
        "tab\there": b"3",
        "a\r": b"4",
        "a": b"5",
        "a\nb": b"",
    }
    commit, _ = store.commit(None, files, "m")
    assert {path: store.read(commit, path) for path in store.ls(commit)} == files


def test_absent_commit_is_named(store: Store) -> None:
    """A missing revision raises SourceError with its name."""
    with pytest.raises(SourceError, match=r"0\.9\.9 is not in the store"):
        store.tree_of("0.9.9")
    with pytest.raises(SourceError, match="lacks object"):
        store.blobs(["0" * 40])


def test_commit_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same changes have the same ids in two stores, in any environment."""
    first = open_store(tmp_path / "a.git").commit(None, {"f": b"x", "g/h": b"y"}, "words")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "someone")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = open_store(tmp_path / "b.git").commit(None, {"g/h": b"y", "f": b"x"}, "words\n")
    assert first == second


def test_commit_changes_deletes_and_keeps_modes(store: Store, tmp_path: Path) -> None:
    """A commit on a parent changes only the given files and keeps their modes."""
    commit = repository(tmp_path / "up")
    git_command.git(store.path, "fetch", "-q", str(tmp_path / "up"), "HEAD", network=True)
    changes = {"scripts/run.sh": b"new\n", "src/llama.cpp": None, "src/new.cpp": b"n\n"}
    child, tree = store.commit(commit, changes, "change")
    modes = {entry.path: entry.mode for entry in store.entries(tree)}
    assert modes["scripts/run.sh"] == "100755"
    assert modes["src/new.cpp"] == "100644"
    assert set(modes) == set(TREE) - {"src/llama.cpp"} | {"src/new.cpp"}
    assert store.parents(child) == [commit]
    assert store.read(child, "docs/crlf.txt") == TREE["docs/crlf.txt"]


def test_commit_date_is_utc(store: Store) -> None:
    """The date of a commit is ISO 8601 in UTC."""
    commit, _ = store.commit(None, {"f": b"x"}, "m")
    assert store.date(commit) == git_command.DATE


def test_release_without_its_ref_is_not_stored(store: Store) -> None:
    """A release is stored only if its ref points at its commit."""
    release = imported(store, "1.0", TREE, "2025-01-01T00:00:00Z")
    assert store.has(release)
    store.delete_ref("refs/upstream/1.0")
    assert not store.has(release)
    assert store.tree_of(release) == release.tree


def test_published_commit_without_parents_is_shallow(store: Store, tmp_path: Path) -> None:
    """A commit without its parents becomes shallow, so that git's tools work on it."""
    commit = repository(tmp_path / "up")
    packed = git_command.git_bytes(
        tmp_path / "up", "pack-objects", "--stdout", "--revs", input=f"{commit}\n^{commit}~1\n"
    )
    git_command.git(store.path, "index-pack", "--stdin", "--fix-thin", input=packed)
    store.update_ref("refs/upstream/x", commit)
    assert git_command.git(store.path, "log", "--format=%H", "refs/upstream/x") == commit
    store.update_ref("refs/upstream/y", commit)
    assert (store.path / "shallow").read_text().split() == [commit]


@pytest.mark.regression(
    "after the import of a clone that was shallow further back, every fetch into the store failed",
    by="hostile input",
    of="Python",
)
def test_a_shallow_history_can_be_fetched(store: Store, tmp_path: Path) -> None:
    """A clone may be shallow further back: the parent is present, its parent is missing."""
    commit = repository(tmp_path / "up", commits=4)
    packed = git_command.git_bytes(
        tmp_path / "up", "pack-objects", "--stdout", "--revs", input=f"{commit}\n^{commit}~2\n"
    )
    git_command.git(store.path, "index-pack", "--stdin", "--fix-thin", input=packed)
    store.update_ref("refs/upstream/x", commit)
    assert git_command.git(store.path, "rev-list", "--all") == commit
    other = repository(tmp_path / "other", TREE | {"x": b"another\n"})
    words = ("fetch", "-q", str(tmp_path / "other"), "HEAD:refs/upstream/y")
    git_command.git(store.path, *words, network=True)
    assert store.ref("refs/upstream/y") == other


@pytest.mark.regression(
    "a commit with many equal parents blocked all users of the store",
    by="hostile input",
    of="Python",
)
def test_repeated_parents_are_looked_up_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit with many equal parents does not slow down readers."""
    commit, tree = store.commit(None, TREE, "m")
    forged = git_command.git(store.path, "cat-file", "commit", commit).replace(
        "author", f"parent {commit}\n" * 1000 + "author", 1
    )
    words = ("hash-object", "-w", "-t", "commit", "--literally", "--stdin")
    child = git_command.git(store.path, *words, input=forged + "\n")
    assert store.parents(child) == [commit]
    true, asked = git_command.run, []

    def counted(*args: object, **options: object) -> object:
        asked.append(args)
        return true(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(git_command, "run", counted)
    store.update_ref("refs/upstream/x", child)
    assert len(asked) < 10
    assert not (store.path / "shallow").exists()
    assert tree == store.tree_of(child)


def test_attributes_of_a_tree_change_nothing(store: Store, tmp_path: Path) -> None:
    """A tree's own .gitattributes do not change the export."""
    commit, _ = store.commit(None, TREE, "m")
    store.export(commit, tmp_path / "out")
    assert (tmp_path / "out" / "docs" / "crlf.txt").read_bytes() == TREE["docs/crlf.txt"]


def test_scratch_is_removed(store: Store) -> None:
    """A scratch directory is removed, also one of a killed process."""
    old = store.path / "tmp-old"
    old.mkdir()
    with store.scratch() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    assert not old.exists()


@pytest.mark.regression(
    "after a clock jumped a day ahead, the store removed a scratch directory in use",
    by="faults",
    of="Python",
)
def test_locked_scratch_directory_is_kept_after_clock_changes(store: Store) -> None:
    """A directory in use is recognised by its lock, because clocks may jump."""
    with store.scratch() as folder:
        before = time.time() - 2 * 86400
        os.utime(folder, (before, before))
        with store.scratch() as other:
            assert folder.is_dir()
            assert other.is_dir()


@pytest.mark.parametrize("left", ["shallow.lock", "packed-refs.lock", "refs/upstream/a.lock"])
@pytest.mark.regression(
    "lock files of a killed git blocked all later writes to the store",
    by="faults",
    of="Python",
)
def test_stale_git_lock_files_are_removed(store: Store, tmp_path: Path, left: str) -> None:
    """Git does not write if a lock file exists; the only writer may remove it."""
    repository(tmp_path / "source", TREE)
    words = ("fetch", "-q", "--depth=1", f"file://{tmp_path / 'source'}", "HEAD:refs/incoming/x")
    (store.path / left).parent.mkdir(parents=True, exist_ok=True)
    (store.path / left).touch()
    with store.ref_lock() as held:
        git_command.git(store.path, *words, hold=(held,), network=True)
    commit = store.ref("refs/incoming/x")
    assert commit is not None
    (store.path / left).touch()
    store.update_ref("refs/upstream/a", commit)
    store.delete_ref("refs/incoming/x")
    assert store.refs("refs") == {"refs/upstream/a": commit}


@pytest.mark.regression(
    "a store whose creation was killed could not be opened",
    by="faults",
    of="Python",
)
def test_incomplete_store_is_completed(tmp_path: Path) -> None:
    """The process that created it was killed while git wrote its settings."""
    whole = open_store(tmp_path / "one" / "store.git").path
    other = tmp_path / "two" / "store.git"
    other.mkdir(parents=True)
    (other / "HEAD").write_bytes((whole / "HEAD").read_bytes())
    (other / "config.lock").touch()
    assert open_store(other).refs("refs") == {}


def test_a_lock_that_is_held_is_named(tmp_path: Path) -> None:
    """The timeout error has the name of the lock."""
    with (
        locked(tmp_path / "a.lock"),
        pytest.raises(SourceError, match=r"a\.lock"),
        locked(tmp_path / "a.lock", seconds=0.05),
    ):
        pass


def test_a_full_disk_is_distinguished_from_other_errors(tmp_path: Path) -> None:
    """A full disk is DiskFull, from Python or from git; other errors are unchanged."""
    with pytest.raises(DiskFull, match="the disk is full"), translate_disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFull), translate_disk_errors(tmp_path):
        raise GitError(["git"], 128, "fatal: write error: No space left on device")
    with pytest.raises(PermissionError), translate_disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(GitError), translate_disk_errors(tmp_path):
        raise GitError(["git"], 1, "other")


def test_atomic_write_keeps_the_old_text_on_failure(tmp_path: Path) -> None:
    """If a text cannot be written, the old file is kept and no other file is left."""
    file = tmp_path / "f"
    write_text_atomic(file, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(file, "\ud800")
    assert file.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [file]
