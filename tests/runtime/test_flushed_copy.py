"""Test copies of kept caches, with files that have the header of the patch mmap-kv."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.errors import KVFileBusy, KVFileError, KVFileFull
from pyllamakv.runtime import flushed_copy

if TYPE_CHECKING:
    from pathlib import Path

CLEAN, DIRTY = 0xC33CC33C, 0x5AA55AA5
SIZE = 1 << 20


def put(path: Path, generation: int, *, state: int = CLEAN, model: bytes = b"m") -> None:
    """Write a cache of a flush: a header, a page of content, a hole, and another page."""
    head = struct.pack("<8sII3QQ", b"llama-kv", 2, state, generation, 7, 8, generation)
    head += struct.pack("<Q", SIZE).ljust(472 - 48, model)
    content = bytes([generation]) * 4096
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(head.ljust(4096, b"\0") + content)
        file.truncate(SIZE)
        file.seek(SIZE - 4096)
        file.write(content)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a flushed cache of two files."""
    path = tmp_path / "chat.kv"
    for each in (path, tmp_path / "chat.kv.1"):
        put(each, 1)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dirty_cache_returns_to_its_last_flush(file: Path, tmp_path: Path) -> None:
    """Copy at two flushes, and restore the second one; the holes of files stay holes."""
    flushed_copy.write(file)
    for number in ("", ".1"):
        put(tmp_path / f"chat.kv{number}", 2)
    flushed_copy.write(file)
    flushed = contents(tmp_path)
    assert set(flushed) == {"chat.kv", "chat.kv.1", "chat.kv.flushed", "chat.kv.1.flushed"}
    copy = tmp_path / "chat.kv.flushed"
    assert flushed["chat.kv"] == flushed["chat.kv.flushed"]
    assert copy.stat().st_blocks * 512 < SIZE
    assert copy.stat().st_mode & 0o077 == 0
    put(file, 3, state=DIRTY)
    with file.open("r+b") as changed:  # a decode into cells that were never used before
        changed.seek(SIZE // 2)
        changed.write(b"new")
    assert flushed_copy.restore(file)
    assert contents(tmp_path) == flushed
    for number in ("", ".1"):
        put(tmp_path / f"chat.kv{number}", 4, state=DIRTY)
    os.truncate(file, 8192)
    assert flushed_copy.restore(file)
    assert contents(tmp_path) == flushed
    flushed_copy.remove(file)
    assert set(contents(tmp_path)) == {"chat.kv", "chat.kv.1"}


def test_a_copy_of_the_same_flush_is_not_written_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush costs a copy, an open after a close does not."""
    flushed_copy.write(file)
    monkeypatch.setattr(flushed_copy, "_copy_data", None)
    flushed_copy.write(file)


@pytest.mark.parametrize("case", ["none", "other model", "other flush", "not clean", "cut", "main"])
def test_other_copies_are_not_restored(file: Path, tmp_path: Path, case: str) -> None:
    """Copies that are missing, incomplete, or of another cache or flush change nothing."""
    flushed_copy.write(file)
    put(file, 3, state=DIRTY)
    copy = tmp_path / "chat.kv.1.flushed"
    if case == "none":
        copy.unlink()
    elif case == "other model":
        put(copy, 1, model=b"n")
    elif case == "other flush":
        put(copy, 2)
    elif case == "not clean":
        put(copy, 1, state=DIRTY)
    elif case == "cut":
        os.truncate(copy, 300)
    else:
        os.truncate(file, 100)  # the header of a file that was being created
    before = contents(tmp_path)
    assert not flushed_copy.restore(file)
    assert contents(tmp_path) == before
    assert not flushed_copy.restore(tmp_path / "nothing")


def test_a_cache_with_an_owner_is_not_restored(file: Path, tmp_path: Path) -> None:
    """The lock of the patch mmap-kv is respected."""
    flushed_copy.write(file)
    put(file, 3, state=DIRTY)
    before = contents(tmp_path)
    with file.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(KVFileBusy, match="in use"):
            flushed_copy.restore(file)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", ["open", "lseek", "pwrite", "ftruncate", "fsync", "replace"])
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, KVFileFull), (errno.EIO, KVFileError)])
def test_a_copy_that_fails_leaves_the_older_one(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    kind: type[Exception],
) -> None:
    """A full disk at any step is a typed error, and the next flush copies again."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    flushed_copy.write(file)
    old = contents(tmp_path)
    put(file, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(file) if call == "replace" else os, call, fail)
        with pytest.raises(kind, match="a kill before the next flush would lose it") as caught:
            flushed_copy.write(file)
        assert type(caught.value) is kind
    assert contents(tmp_path) == old | {"chat.kv": file.read_bytes()}
    flushed_copy.write(file)
    assert (tmp_path / "chat.kv.flushed").read_bytes() == file.read_bytes()


def test_a_restoration_that_fails_can_be_repeated(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until everything is restored, the file stays dirty."""
    flushed_copy.write(file)
    whole = contents(tmp_path)
    put(file, 3, state=DIRTY)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for call in ("pread", "fsync", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(KVFileError, match="could not be restored"):
                flushed_copy.restore(file)
        assert file.read_bytes()[12:16] == struct.pack("<I", DIRTY)
    assert flushed_copy.restore(file)
    assert contents(tmp_path) == whole


def test_zeros_take_no_space(file: Path, tmp_path: Path) -> None:
    """Zeros that were written, or read into the page cache, are holes of the copy."""
    with file.open("r+b") as written:
        written.seek(8192)
        written.write(bytes(SIZE - 8192 - 4096))
    flushed_copy.write(file)
    copy = tmp_path / "chat.kv.flushed"
    assert copy.read_bytes() == file.read_bytes()
    assert copy.stat().st_blocks * 512 < SIZE // 2


def test_short_writes_are_continued(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write fewer bytes than requested."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, data, at: real(to, data[:1000], at))
    flushed_copy.write(file)
    assert (tmp_path / "chat.kv.flushed").read_bytes() == file.read_bytes()
