"""Test that the file of a trace always has complete rows."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pyllamakv.errors import DiskFull, ScriptError, UsageError
from pyllamakv.traces import trace
from pyllamakv.traces.trace import TraceFile


def test_trace_lines_are_written_unbuffered(tmp_path: Path) -> None:
    """Rows are written without a buffer, and an existing file is replaced."""
    path = tmp_path / "t.jsonl"
    path.write_text("old\n" * 100)
    file = TraceFile(path)
    file.write(["a", "b"])
    assert path.read_text() == "a\nb\n"
    file.write([])
    file.close()
    file.close()
    assert file.closed


def test_unwritable_trace_path_is_refused(tmp_path: Path) -> None:
    """Check a missing directory, and a directory in place of the file."""
    with pytest.raises(UsageError, match="cannot be written"):
        TraceFile(tmp_path / "nowhere" / "t.jsonl")
    with pytest.raises(UsageError, match="cannot be written"):
        TraceFile(tmp_path)


@pytest.mark.regression(
    "two processes that recorded into one file mixed their rows",
    by="faults",
    of="Python",
)
def test_second_writer_of_a_trace_is_refused(tmp_path: Path) -> None:
    """Two writers would mix their rows; the lock of the first is released at its end."""
    path = tmp_path / "t.jsonl"
    file = TraceFile(path)
    file.write(["mine"])
    with pytest.raises(UsageError, match="written by another recording"):
        TraceFile(path)
    assert path.read_text() == "mine\n"
    file.close()
    TraceFile(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, ScriptError)],
)
def test_a_full_disk_leaves_the_rows_before(tmp_path, monkeypatch, number, expected) -> None:
    """A partial chunk is truncated, so that the file ends with a complete row."""
    path = tmp_path / "t.jsonl"
    file = TraceFile(path)
    file.write(["first"])
    real, calls = os.write, []

    def half(handle: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return real(handle, data[: len(data) // 2])

    monkeypatch.setattr(trace.os, "write", half)
    with pytest.raises(expected) as caught:
        file.write(["second", "third"])
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    assert path.read_text() == "first\n"
    # Recording continues from there when there is space again.
    file.write(["fourth"])
    file.close()
    assert path.read_text() == "first\nfourth\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_device_raises_disk_full() -> None:
    """A device that is always full raises DiskFull."""
    file = TraceFile(Path("/dev/full"))
    with pytest.raises(DiskFull, match="the disk is full"):
        file.write(["row"])
    file.close()
