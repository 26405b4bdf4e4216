"""A trace's file has whole rows, whatever happens."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pyllamakv.errors import DiskFull, ScriptError, UsageError
from pyllamakv.traces import trace
from pyllamakv.traces.trace import TraceFile


def test_trace_lines_are_written_unbuffered(tmp_path: Path) -> None:
    """Nothing waits in a buffer of ours, and what was there before is replaced."""
    path = tmp_path / "t.jsonl"
    path.write_text("old\n" * 100)
    file = TraceFile(path)
    file.write(["a", "b"])
    assert path.read_text() == "a\nb\n"
    file.write([])
    file.close()
    file.close()
    assert file.closed


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A folder that is not there, and one in the place of the file."""
    with pytest.raises(UsageError, match="cannot be written"):
        TraceFile(tmp_path / "nowhere" / "t.jsonl")
    with pytest.raises(UsageError, match="cannot be written"):
        TraceFile(tmp_path)


@pytest.mark.regression(
    "two processes that recorded into one file mixed their rows",
    by="faults",
    of="Python",
)
def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Two would mix their rows; the first keeps what it wrote, and lets go when it ends."""
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
    """Half a chunk is taken back, so that the file ends with a whole row."""
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
    # And goes on from there, when there is room again.
    file.write(["fourth"])
    file.close()
    assert path.read_text() == "first\nfourth\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_the_system_s_own_word_for_full() -> None:
    """A device that is always full is a full disk."""
    file = TraceFile(Path("/dev/full"))
    with pytest.raises(DiskFull, match="the disk is full"):
        file.write(["row"])
    file.close()
