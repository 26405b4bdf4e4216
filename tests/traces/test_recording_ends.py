"""Test that the run continues and the file is readable for any end of a recording."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_kit

import pyllamakv as kv
from pyllamakv.errors import DiskFull
from pyllamakv.traces import recording_native, trace
from pyllamakv.traces.recording_native import RecordingNative

ROOT = Path(__file__).resolve().parents[2]


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path, monkeypatch, caplog) -> None:
    """The run continues; the error is raised at the end of the block; written rows are readable."""
    path = tmp_path / "run.jsonl"
    real, full = os.write, []

    def write(handle: int, data: memoryview) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(trace.os, "write", write)
    with runtime_kit.context(tmp_path) as context:
        a = context.sequence()
        with pytest.raises(DiskFull, match="make room"), kv.record(context, path) as recording:
            a.step(5)
            recording.flush()
            full.append(True)
            for token in range(5, 40):
                a.step(token)
            recording.flush()
            assert isinstance(recording.error, DiskFull)
            a.step(6)
            assert len(a) == 37
        a.step(7)
        assert not isinstance(context.native, RecordingNative)
        monkeypatch.undo()
        head, lines = trace.read(path)
        assert (head.complete, len(lines)) == (False, 2)
        # An error of the run is not replaced by that of the recording.
        full.append(True)
        monkeypatch.setattr(trace.os, "write", lambda *_: real(*_))
        with pytest.raises(ZeroDivisionError), kv.record(context, path):
            raise ZeroDivisionError


def test_closing_the_context_completes_the_recording(tmp_path: Path) -> None:
    """All rows until then are in the file."""
    path = tmp_path / "run.jsonl"
    context = runtime_kit.context(tmp_path)
    with kv.record(context, path):
        context.sequence().step(5)
        context.close()
    assert trace.read(path)[0].complete


CRASH = """
import os, sys
sys.path.insert(0, {tests!r})
import runtime_kit, pathlib, pyllamakv as kv
from pyllamakv.traces import recording_native
recording_native.CHUNK = 64
context = runtime_kit.context(pathlib.Path({folder!r}), n_ctx=2048)
with kv.record(context, {path!r}):
    a = context.sequence()
    for token in range(1000):
        a.step(token % 200)
    os._exit(9)
"""


@pytest.mark.slow
def test_a_crash_loses_the_last_chunk_at_most(tmp_path: Path) -> None:
    """A process that crashes leaves a shorter trace."""
    path = tmp_path / "run.jsonl"
    code = CRASH.format(tests=str(ROOT / "tests" / "kits"), folder=str(tmp_path), path=str(path))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=240)
    assert done.returncode == 9
    head, lines = trace.read(path)
    assert not head.complete
    assert 1 + 1000 - 64 - recording_native.BEST_EVERY <= len(lines) <= 1001
    # Truncated anywhere, it is still a trace if a row is complete.
    data = path.read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) * 2 // 3])
    assert 1 < len(trace.read(tmp_path / "cut")[1]) < len(lines)
