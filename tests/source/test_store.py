"""The store: one bare repository that is read and extended the same way everywhere."""

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
    """Opening makes a store once; the second time finds what the first put there."""
    path = tmp_path / "store.git"
    commit, _ = open_store(path).commit(None, {"f": b"x"}, "m")
    assert open_store(path).read(commit, "f") == b"x"


def test_many_may_open_at_once(tmp_path: Path) -> None:
    """Opening from several threads at the same time gives one whole store."""
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: open_store(tmp_path / "store.git"), range(8)))
    assert all(s.commit(None, {"f": b"x"}, "m") for s in stores)


def test_home_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path, the store is below the data directory."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "h"))
    assert open_store().path == tmp_path / "h" / "store.git"


def test_read_and_list(store: Store) -> None:
    """Files are read and listed by path, and an absent one is None."""
    commit, tree = store.commit(None, {"src/a.c": b"a", "src/b/c.h": b"\xff\r\n", "x": b""}, "m")
    assert store.ls(commit) == ["src/a.c", "src/b/c.h", "x"]
    assert store.ls(tree, "src") == store.ls(tree, "src/") == ["src/a.c", "src/b/c.h"]
    assert store.ls(tree, "sr") == []
    assert store.read(tree, "src/b/c.h") == b"\xff\r\n"
    found = store.read_many(commit, ["x", "src", "none", "src/a.c"])
    assert found == {"x": b"", "src": None, "none": None, "src/a.c": b"a"}
    assert store.read_text(commit, "none") == ""


@pytest.mark.regression(
    "files of a tree with a newline or a carriage return in their name could not be read, or "
    "were taken for another",
    by="hostile input",
    of="Python",
)
def test_paths_with_odd_characters(store: Store) -> None:
    """Spaces, quotes and letters beyond ASCII survive in paths."""
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
    """A revision that is not there gives SourceError with its name."""
    with pytest.raises(SourceError, match=r"0\.9\.9 is not in the store"):
        store.tree_of("0.9.9")
    with pytest.raises(SourceError, match="lacks object"):
        store.blobs(["0" * 40])


def test_commit_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same changes give the same ids in two stores, whatever the environment says."""
    first = open_store(tmp_path / "a.git").commit(None, {"f": b"x", "g/h": b"y"}, "words")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "someone")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = open_store(tmp_path / "b.git").commit(None, {"g/h": b"y", "f": b"x"}, "words\n")
    assert first == second


def test_commit_changes_deletes_and_keeps_modes(store: Store, tmp_path: Path) -> None:
    """A commit on a parent changes only what it names, and a script stays a script."""
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


def test_date_is_utc(store: Store) -> None:
    """The date of a commit is ISO 8601 in UTC."""
    commit, _ = store.commit(None, {"f": b"x"}, "m")
    assert store.date(commit) == git_command.DATE


def test_has_only_what_was_published(store: Store) -> None:
    """A release counts as there only when its ref points at its commit."""
    release = imported(store, "1.0", TREE, "2025-01-01T00:00:00Z")
    assert store.has(release)
    store.delete_ref("refs/upstream/1.0")
    assert not store.has(release)
    assert store.tree_of(release) == release.tree


def test_publish_cuts_off_absent_parents(store: Store, tmp_path: Path) -> None:
    """A commit without its parents becomes a shallow one, so that git's tools work on it."""
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
    "a clone that was shallow further back left a store into which nothing could be fetched any "
    "more",
    by="hostile input",
    of="Python",
)
def test_a_shallow_history_can_be_fetched(store: Store, tmp_path: Path) -> None:
    """A clone may be shallow, with the parent present and the parent's parent missing."""
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
    "a commit that names a parent again and again held up everybody who used the store",
    by="hostile input",
    of="Python",
)
def test_a_parent_is_looked_for_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit may name a parent many times, which must not slow down its readers."""
    commit, tree = store.commit(None, TREE, "m")
    said = git_command.git(store.path, "cat-file", "commit", commit).replace(
        "author", f"parent {commit}\n" * 1000 + "author", 1
    )
    words = ("hash-object", "-w", "-t", "commit", "--literally", "--stdin")
    child = git_command.git(store.path, *words, input=said + "\n")
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
    """A tree's own .gitattributes have no power over what is exported."""
    commit, _ = store.commit(None, TREE, "m")
    store.export(commit, tmp_path / "out")
    assert (tmp_path / "out" / "docs" / "crlf.txt").read_bytes() == TREE["docs/crlf.txt"]


def test_scratch_is_removed(store: Store) -> None:
    """A scratch folder goes away, also one that a killed process left."""
    old = store.path / "tmp-old"
    old.mkdir()
    with store.scratch() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    assert not old.exists()


@pytest.mark.regression(
    "a clock that jumped a day ahead took the scratch folder of the store from under who worked "
    "in it",
    by="faults",
    of="Python",
)
def test_scratch_of_others_stays_whatever_the_clock_says(store: Store) -> None:
    """A folder in use is recognized by its lock, because clocks may jump."""
    with store.scratch() as folder:
        before = time.time() - 2 * 86400
        os.utime(folder, (before, before))
        with store.scratch() as other:
            assert folder.is_dir()
            assert other.is_dir()


@pytest.mark.parametrize("left", ["shallow.lock", "packed-refs.lock", "refs/upstream/a.lock"])
@pytest.mark.regression(
    "lock files that a killed git left kept everybody from writing to the store again",
    by="faults",
    of="Python",
)
def test_stale_git_lock_files_are_removed(store: Store, tmp_path: Path, left: str) -> None:
    """Git refuses to write where a lock file exists; the only writer may remove it."""
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
    "a store that was killed while it was made could not be opened any more",
    by="faults",
    of="Python",
)
def test_half_a_store_is_made_whole(tmp_path: Path) -> None:
    """Whoever made it was killed while git wrote its settings."""
    whole = open_store(tmp_path / "one" / "store.git").path
    other = tmp_path / "two" / "store.git"
    other.mkdir(parents=True)
    (other / "HEAD").write_bytes((whole / "HEAD").read_bytes())
    (other / "config.lock").touch()
    assert open_store(other).refs("refs") == {}


def test_a_lock_that_is_held_is_named(tmp_path: Path) -> None:
    """Waiting for a lock ends with the lock's name."""
    with (
        locked(tmp_path / "a.lock"),
        pytest.raises(SourceError, match=r"a\.lock"),
        locked(tmp_path / "a.lock", seconds=0.05),
    ):
        pass


def test_a_full_disk_is_distinguished_from_other_errors(tmp_path: Path) -> None:
    """A full disk is DiskFull, from Python or from git; other errors stay what they are."""
    with pytest.raises(DiskFull, match="the disk is full"), translate_disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFull), translate_disk_errors(tmp_path):
        raise GitError(["git"], 128, "fatal: write error: No space left on device")
    with pytest.raises(PermissionError), translate_disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(GitError), translate_disk_errors(tmp_path):
        raise GitError(["git"], 1, "other")


def test_atomic_write_keeps_the_old_text_on_failure(tmp_path: Path) -> None:
    """A text that cannot be written leaves the old file and nothing beside it."""
    file = tmp_path / "f"
    write_text_atomic(file, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(file, "\ud800")
    assert file.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [file]
