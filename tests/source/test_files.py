"""Test file writes: atomic, one writer at a time, with typed disk errors."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import DiskFailed, DiskFull, SourceError, UsageError
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.files import (
    inheritable_lock,
    locked,
    translate_disk_errors,
    write_bytes_atomic,
    write_text_atomic,
)
from pyllamakv.traces import model_digest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.regression(
    "killed writes left files with random names, which accumulated",
    by="faults",
    of="Python",
)
def test_write_replaces_a_stale_part_file(tmp_path: Path) -> None:
    """The name of a partial file is fixed, so partial files do not accumulate."""
    (tmp_path / ".file.part").write_text("half of something that is longer")
    write_text_atomic(tmp_path / "file", "all")
    assert (tmp_path / "file").read_text() == "all"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["link", "dangling", "hard", "pipe"])
@pytest.mark.regression(
    "a link in a foreign directory, at the path of a partial file, let a write replace any file "
    "of the user",
    by="hostile input",
    of="Python",
)
def test_link_at_the_path_of_a_part_file_is_not_followed(tmp_path: Path, kind: str) -> None:
    """If a directory contains a link of that name, its target is unchanged."""
    victim, folder = tmp_path / "victim", tmp_path / "theirs"
    folder.mkdir()
    victim.write_text("mine")
    victim.chmod(0o600)
    part = folder / ".file.part"
    if kind == "hard":
        part.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(part)
    else:
        part.symlink_to(victim if kind == "link" else tmp_path / "new")
    write_text_atomic(folder / "file", "all")
    assert (folder / "file").read_text() == "all"
    assert not (folder / "file").is_symlink()
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("mine", 0o600)
    assert not (tmp_path / "new").exists()


def test_a_directory_in_place_of_a_part_is_reported(tmp_path: Path) -> None:
    """It is not removed, because another program may have created content there."""
    (tmp_path / ".file.part").mkdir()
    with pytest.raises(SourceError, match="is a directory"):
        write_text_atomic(tmp_path / "file", "all")


@pytest.mark.regression(
    "a file could be readable for others against the umask",
    by="hostile input",
    of="Python",
)
def test_written_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    """Neither a stale partial file nor the previous file makes it readable for others."""
    (tmp_path / ".file.part").touch(0o666)
    (tmp_path / ".file.part").chmod(0o666)
    before = os.umask(0o077)
    try:
        write_text_atomic(tmp_path / "file", "all")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_concurrent_writes_leave_one_complete_text(tmp_path: Path) -> None:
    """Writers wait for each other; no text is mixed, and no file is left."""
    texts = [f"{number}" * 5000 for number in range(8)]
    threads = [
        threading.Thread(target=write_bytes_atomic, args=(tmp_path / "file", text.encode()))
        for text in texts * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is typed, and no temporary file is left."""
    write_text_atomic(tmp_path / "file", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(DiskFull):
        write_text_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EFBIG, DiskFull),
        (errno.EIO, DiskFailed),
        (errno.EROFS, DiskFailed),
        (errno.ENOENT, FileNotFoundError),
    ],
)
@pytest.mark.regression(
    "a limit on file sizes and a failing or read-only disk raised untyped errors",
    by="faults",
    of="Python",
)
def test_disk_errors_have_their_own_exceptions(
    number: int, expected: type[Exception], tmp_path: Path
) -> None:
    """A full disk, a size limit and a failing disk have their own errors; others are unchanged."""
    with pytest.raises(expected), translate_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_read_only_data_directory_is_reported(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the data directory is read-only, the error names the variable to set, before any work."""

    def refused(*_words: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    with pytest.raises(UsageError, match="set PYLLAMAKV_HOME"), locked(tmp_path / "a.lock"):
        pass
    with pytest.raises(UsageError, match="set PYLLAMAKV_HOME"):
        synthetic_models.generate(synthetic_models.SHAPES["tiny"], tmp_path)
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="set PYLLAMAKV_HOME"):
        model_digest.find("tiny", "")


def test_a_data_directory_that_is_a_file_is_reported(tmp_path: Path) -> None:
    """The error names the variable."""
    (tmp_path / "home").touch()
    for place in (tmp_path / "home" / "a.lock", tmp_path / "home" / "locks" / "a.lock"):
        with pytest.raises(UsageError, match="cannot be written"), locked(place):
            pass


def test_an_inherited_lock_lasts_as_long_as_the_child(tmp_path: Path) -> None:
    """If a child outlives its parent, it keeps the lock, and no other process starts."""
    with inheritable_lock(tmp_path / "lock") as handle:
        kept = os.dup(handle)
    entered = threading.Event()

    def enter() -> None:
        with inheritable_lock(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.3)
    os.close(kept)
    thread.join()
    assert entered.is_set()
