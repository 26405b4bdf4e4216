"""Test digests of files: all bytes count, stored results are validated, Ctrl-C ends them."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv import content_digest
from pyllamakv.errors import ModelUnverified

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a data directory, in which results are stored immediately."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(content_digest, "SETTLED_NS", -(1 << 62))
    return tmp_path / "home"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the offset of each read of a hashed file."""
    found: list[int] = []
    real = os.pread

    def pread(handle: int, size: int, at: int) -> bytes:
        found.append(at)
        return real(handle, size, at)

    monkeypatch.setattr(os, "pread", pread)
    return found


def digest(*paths: Path, **options: Any) -> str:
    """Record files now, and return their digest."""
    return content_digest.compute([content_digest.record(path) for path in paths], **options)


def entries(home: Path) -> list[Path]:
    """Return the files of known digests."""
    return list((home / "digests").iterdir())


def expected(content: bytes, chunk: int) -> str:
    """Return the digest as the module's docstring defines it."""
    parts = [
        hashlib.sha256(content[at : at + chunk]).digest() for at in range(0, len(content), chunk)
    ]
    begin = b"pyllamakv content 1\n" + len(content).to_bytes(8, "little")
    return hashlib.sha256(begin + b"".join(parts)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("cpus", [1, 3])
def test_digest_is_independent_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, cpus: int
) -> None:
    """The result does not depend on threads, but on every byte and the size."""
    monkeypatch.setattr(content_digest, "CHUNK", 100)
    monkeypatch.setattr(content_digest, "_PIECE", 7)
    monkeypatch.setattr(content_digest, "usable_cpus", lambda: cpus)
    content = bytes(i % 251 for i in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest(path) == expected(content, 100)
    assert content_digest.is_digest(digest(path))
    for at in range(0, size, max(1, size // 9)):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert digest(path) == expected(bytes(changed), 100) != expected(content, 100)


def test_digest_is_computed_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calling thread computes then."""
    monkeypatch.setattr(content_digest, "CHUNK", 100)
    monkeypatch.setattr(content_digest, "usable_cpus", lambda: 4)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 2)
    assert digest(path) == expected(path.read_bytes(), 100)


def test_digest_depends_on_order_and_content_of_files(tmp_path: Path) -> None:
    """It depends on each file and their order; a split model is not its first file."""
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    both = digest(one, two)
    assert (
        both
        == hashlib.sha256(
            b"pyllamakv files 1\n" + bytes.fromhex(digest(one)) + bytes.fromhex(digest(two))
        ).hexdigest()
    )
    assert len({both, digest(two, one), digest(one), digest(two)}) == 4


def test_a_known_digest_is_not_computed_again(tmp_path: Path, home: Path, reads: list[int]) -> None:
    """Another size, modification time or change time is other content."""
    path = tmp_path / "file"
    path.write_bytes(b"first")
    first = digest(path)
    del reads[:]
    assert digest(path) == first
    assert not reads
    path.write_bytes(b"other")  # the same size; mtime and ctime differ
    assert digest(path) != first
    assert reads
    before = path.stat()
    path.write_bytes(b"third")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # ctime alone differs
    assert digest(path) == expected(b"third", content_digest.CHUNK)
    del reads[:]
    os.utime(path, ns=(1, 1))
    assert digest(path) == expected(b"third", content_digest.CHUNK)
    assert reads
    assert len(entries(home)) == 1


def test_a_recent_change_is_not_kept(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same tick of the clock would have the same times."""
    monkeypatch.setattr(content_digest, "SETTLED_NS", 1 << 62)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert digest(path) == expected(b"content", content_digest.CHUNK)
    assert not (home / "digests").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-2],
        lambda text: text.replace("a", "b"),
        lambda text: text + text,
        lambda text: "\xff\0",
        lambda text: " ".join(text.split(" ")[:-1]),
    ],
    ids=["empty", "short", "digit", "twice", "bytes", "no checksum"],
)
def test_a_damaged_entry_is_ignored(
    tmp_path: Path, home: Path, damage: Callable[[str], str]
) -> None:
    """It is computed again, and replaced."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    right = digest(path)
    (entry,) = entries(home)
    text = entry.read_text()
    entry.write_text(damage(text), "latin-1")
    assert digest(path) == right
    assert entry.read_text() == text


@pytest.mark.parametrize("obstacle", ["file", "directory", "full"])
def test_unwritable_data_directory_stores_no_digest(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """Only time is lost, and no partial file remains."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    if obstacle == "file":
        home.write_bytes(b"")
    elif obstacle == "directory":
        facts = content_digest.record(path).facts
        assert facts is not None
        (home / "digests" / f"{facts[0]:x}-{facts[1]:x}").mkdir(parents=True)
    else:
        real = os.open

        def refuse(name: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(name, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
    assert digest(path) == digest(path) == expected(b"content", content_digest.CHUNK)
    if obstacle != "file":
        assert all(each.is_dir() for each in entries(home))


def test_file_changed_since_its_record_is_refused(tmp_path: Path) -> None:
    """The error has the reason: changed, replaced, removed, or not a regular file."""
    path = tmp_path / "file"
    for change, why in (
        (lambda: path.write_bytes(b"longer than before"), r"size 7 → 18"),
        (lambda: (path.unlink(), path.write_bytes(b"content")), "replaced or changed"),
        (lambda: os.utime(path, ns=(1, 1)), "mtime_ns"),
        (path.unlink, "cannot be read: No such file"),
    ):
        path.write_bytes(b"content")
        recorded = content_digest.record(path)
        change()
        with pytest.raises(ModelUnverified, match=why):
            content_digest.compute([recorded])
    with pytest.raises(ModelUnverified, match="not a regular file"):
        digest(tmp_path)


def test_file_changed_during_the_digest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result belongs to neither content, and is not used."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    recorded = content_digest.record(path)
    real = os.pread

    def pread(handle: int, size: int, at: int) -> bytes:
        os.truncate(path, 10)
        return real(handle, size, at)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(ModelUnverified, match="size 1000 → 10"):
        content_digest.compute([recorded])


def test_digest_progress_is_reported_or_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function gets all reports; without one, the log has a line for a long computation."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    seen: list[tuple[str, int, int | None]] = []
    right = digest(path, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("digest of file", 1000, 1000)
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "pyllamakv"):
        assert digest(path) == right
        assert not caplog.records
        monkeypatch.setattr(content_digest, "_QUIET", 0)
        os.utime(path, ns=(2, 2))
        assert digest(path) == right
    assert "digest of file" in caplog.text


def test_processes_share_results(tmp_path: Path, home: Path) -> None:
    """Concurrent processes each have the right digest, and one entry remains."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 << 20))
    code = (
        "import sys, pathlib\n"
        "from pyllamakv import content_digest as c\n"
        "c.SETTLED_NS = -(1 << 62)\n"
        "for _ in range(20):\n"
        "    for each in pathlib.Path(sys.argv[2]).glob('*'): each.unlink(missing_ok=True)\n"
        "    print(c.compute([c.record(pathlib.Path(sys.argv[1]))]))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(home / "digests")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [each.communicate(timeout=300)[0].split() for each in running]
    assert {line for lines in outputs for line in lines} == {digest(path)}
    assert [len(lines) for lines in outputs] == [20] * 3
    assert not [each for each in entries(home) if each.name.endswith(".part")]


@pytest.mark.parametrize("cpus", [1, 3])
def test_ctrl_c_ends_the_computation(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    """It does within a chunk, in any thread; no result is stored, and no thread remains."""
    monkeypatch.setattr(content_digest, "CHUNK", 1 << 20)
    monkeypatch.setattr(content_digest, "_PIECE", 1 << 10)
    monkeypatch.setattr(content_digest, "usable_cpus", lambda: cpus)
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    pieces = []
    real = os.pread

    def slow(handle: int, size: int, at: int) -> bytes:
        pieces.append(at)
        if len(pieces) == 5:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.001)
        return real(handle, size, at)

    monkeypatch.setattr(os, "pread", slow)
    with pytest.raises(KeyboardInterrupt):
        digest(path)
    # The whole file has 65,536 chunks.
    assert len(pieces) < 1000
    # Ctrl-C in the start of a thread leaves it unknown to its pool; it ends by itself.
    left = [each for each in threading.enumerate() if each.name.startswith("digest")]
    for each in left:
        each.join(60)
    assert not any(each.is_alive() for each in left)
    assert not (home / "digests").exists()
