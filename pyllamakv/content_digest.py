"""Identify model and adapter files by a digest of all their bytes.

The digest of a file is the SHA-256 of the text "pyllamakv content 1" and a newline, the size in 8
bytes (little-endian), and the SHA-256 of each chunk of 64 MiB. Threads hash the chunks. The digest
of several files (a split model) is the SHA-256 of "pyllamakv files 1", a newline, and the digests
of the files in their order. Metadata is a part of the files.

A known digest is kept in the data directory, in a file per device and inode, and is valid while
size, modification time and change time of the hashed file stay the same.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from pyllamakv.cpus import usable_cpus
from pyllamakv.errors import KvError, ModelUnverified
from pyllamakv.home import home

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LOG = logging.getLogger("pyllamakv")

CHUNK: Final = 64 << 20
#: Bytes between two checks for an interruption.
_PIECE: Final = 1 << 20
_MAX_THREADS: Final = 16
#: Seconds before the first report, between two reports, and between two looks at the threads.
_QUIET, _EVERY, _TICK = 2.0, 10.0, 0.1
#: Age in nanoseconds of a file's last change from which its digest is kept. Two changes within one
#: tick of the file system's clock have the same time.
SETTLED_NS: Final = 2_000_000_000
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file when it was loaded: device, inode, size, mtime_ns and ctime_ns.

    ``facts`` is None if the path does not name a regular file.
    """

    path: Path
    facts: tuple[int, int, int, int, int] | None


def record(path: Path, opened: int | None = None) -> FileRecord:
    """Return the record of a file, or of an open descriptor of it."""
    try:
        found = path.stat() if opened is None else os.fstat(opened)
    except OSError:
        return FileRecord(path, None)
    return FileRecord(path, _facts(found))


def is_digest(text: object) -> bool:
    """Return whether a text is a digest of this module."""
    return isinstance(text, str) and _HEX64.fullmatch(text) is not None


def compute(
    files: Sequence[FileRecord], progress: Callable[[str, int, int | None], None] | None = None
) -> str:
    """Return the digest of recorded files; files with a known digest are not read.

    ``progress`` is called with a description, the bytes done, and their total. Without it, a
    warning in the log reports the progress of a digest that takes longer than two seconds. Ctrl-C
    ends the computation. Raises ModelUnverified if a file cannot be read, or has changed since it
    was recorded.
    """
    found = [_file_digest(each, progress) for each in files]
    if len(found) == 1:
        return found[0]
    return sha256(b"pyllamakv files 1\n" + b"".join(map(bytes.fromhex, found))).hexdigest()


def check_not_written(files: Sequence[FileRecord]) -> None:
    """Raise ModelUnverified if a recorded file was written since, which changes mapped weights.

    A file that was removed, or replaced by another one, keeps its content for those that mapped it.
    """
    for file in files:
        try:
            now = _facts(file.path.stat())
        except OSError:
            continue
        if now and file.facts and now[:2] == file.facts[:2]:
            _compare(file, now)


def _file_digest(file: FileRecord, progress: Callable[[str, int, int | None], None] | None) -> str:
    if file.facts is None:
        raise _unverified(file, "it was not a regular file when it was loaded")
    try:
        with file.path.open("rb", buffering=0) as opened:
            _check_unchanged(file, opened.fileno())
            known = _known(file.facts)
            if known is not None:
                return known
            found = _hash(file, opened.fileno(), progress)
            _check_unchanged(file, opened.fileno())
    except OSError as error:
        raise _unverified(file, f"it cannot be read: {error.strerror or error}") from error
    _keep(file.facts, found)
    return found


def _facts(found: os.stat_result) -> tuple[int, int, int, int, int] | None:
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_unchanged(file: FileRecord, opened: int) -> None:
    _compare(file, _facts(os.fstat(opened)))


def _compare(file: FileRecord, now: tuple[int, int, int, int, int] | None) -> None:
    if now != file.facts:
        names = ("device", "inode", "size", "mtime_ns", "ctime_ns")
        pairs = zip(names, file.facts or (), now or (), strict=False)
        changed = ", ".join(f"{name} {then} → {here}" for name, then, here in pairs if then != here)
        raise _unverified(file, f"it was replaced or changed after it was loaded ({changed})")


def _unverified(file: FileRecord, why: str) -> ModelUnverified:
    msg = f"the content of {file.path} cannot be verified: {why}; load the file again"
    return ModelUnverified(msg)


# --- the hash ---------------------------------------------------------------------------------


class _Meter:
    """Count hashed bytes, and report them."""

    def __init__(
        self, path: Path, total: int, progress: Callable[[str, int, int | None], None] | None
    ) -> None:
        self.stopped = threading.Event()
        self._what = f"digest of {path.name}"
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._next = time.monotonic() + _QUIET

    def add(self, n: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += n

    def report(self) -> None:
        """Report the progress, if it is time."""
        if self._progress is not None:
            self._progress(self._what, self._done, self._total)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            LOG.warning(
                "%s: %d of %d MB; the result is kept until the file changes",
                self._what, self._done // 10**6, self._total // 10**6,
            )  # fmt: skip


def _hash(
    file: FileRecord, opened: int, progress: Callable[[str, int, int | None], None] | None
) -> str:
    assert file.facts is not None, "the record of a regular file has facts"
    size = file.facts[2]
    starts = range(0, size, CHUNK)
    meter = _Meter(file.path, size, progress)
    chunks: list[bytes] = []
    n_threads = min(usable_cpus(), len(starts), _MAX_THREADS)
    if n_threads > 1:
        # Without the `with`, Ctrl-C during the wait would leave the threads running.
        with ThreadPoolExecutor(n_threads, "digest") as pool:
            try:
                # No thread can be started: the loop below hashes everything.
                with suppress(RuntimeError):
                    waiting = [pool.submit(_chunk, opened, each, size, meter) for each in starts]
                    while wait(waiting, _TICK).not_done:
                        meter.report()
                    chunks = [each.result() for each in waiting]
            except BaseException:
                meter.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for start in starts[len(chunks) :]:
        chunks.append(_chunk(opened, start, size, meter, meter.report))
    meter.report()
    return sha256(
        b"pyllamakv content 1\n" + size.to_bytes(8, "little") + b"".join(chunks)
    ).hexdigest()


def _chunk(
    opened: int, start: int, size: int, meter: _Meter, report: Callable[[], None] | None = None
) -> bytes:
    """Return the SHA-256 of the chunk of a file at an offset."""
    found = sha256()
    at, end = start, min(start + CHUNK, size)
    while at < end and not meter.stopped.is_set():
        piece = os.pread(opened, min(_PIECE, end - at), at)
        if not piece:
            break  # truncated: its facts have changed
        found.update(piece)
        at += len(piece)
        meter.add(len(piece))
        if report is not None:
            report()
    return found.digest()


# --- known digests ----------------------------------------------------------------------------


def _place(facts: tuple[int, int, int, int, int]) -> Path:
    return home() / "digests" / f"{facts[0]:x}-{facts[1]:x}"


def _line(facts: tuple[int, int, int, int, int], digest: str) -> str:
    """Return the text of a known digest, with a checksum."""
    text = " ".join((*map(str, facts), digest))
    return f"{text} {sha256(text.encode()).hexdigest()[:16]}\n"


def _known(facts: tuple[int, int, int, int, int]) -> str | None:
    """Return the known digest of a file. A damaged entry is none."""
    try:
        text = _place(facts).read_text("ascii")
    except (OSError, ValueError):
        return None
    words = text.split(" ")
    digest = words[5] if len(words) == 7 else ""
    return digest if is_digest(digest) and text == _line(facts, digest) else None


def _keep(facts: tuple[int, int, int, int, int], digest: str) -> None:
    """Write a known digest.

    A data directory that cannot be written costs the time of the next computation.
    """
    if time.time_ns() - facts[4] < SETTLED_NS:
        return
    from pyllamakv.source.files import write_text_atomic  # most programs compute no digest

    with suppress(OSError, KvError):
        write_text_atomic(_place(facts), _line(facts, digest))
