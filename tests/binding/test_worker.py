"""Test that a worker that crashes, hangs or is killed raises an error and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes.build import ABORT, EXIT, HANG, LOG, SEGV, fake
from fakes.opened import LONG, reaped, until

from pyllamakv.binding import process
from pyllamakv.binding.protocol import (
    ContextHandle,
    ContextParams,
    ModelHandle,
    ModelParams,
)
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import (
    Closed,
    LoadError,
    NativeError,
    WorkerDied,
    WorkerTimeout,
)

pytest_plugins = ("fakes.opened",)


@pytest.fixture
def native(remote: Remote) -> Remote:
    """Open a library in a worker only."""
    return remote


def gone(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in {"Z", "X"}


@pytest.mark.parametrize(
    ("token", "number", "status"),
    [(ABORT, signal.SIGABRT, -6), (SEGV, signal.SIGSEGV, -11), (EXIT, 0, 7)],
)
def test_ended_worker_reports_signal_operation_and_log(
    remote: Remote, context: ContextHandle, token: int, number: int, status: int
) -> None:
    """The error has signal or status, the operation and the last lines; later calls repeat it."""
    remote.decode(context, [LOG], [0], None, (0,), None)
    remote.logs()
    with pytest.raises(WorkerDied) as caught:
        remote.decode(context, [token], [1], None, (0,), None)
    assert (caught.value.signal, caught.value.exitcode) == (number, status)
    assert "decode" in str(caught.value)
    assert "fake: warned" in caught.value.log
    if token == ABORT:
        assert "SIGABRT" in str(caught.value)
        assert caught.value.log[-1] == "fake: GGML_ASSERT(token != abort) failed"
    assert reaped(remote.pid)
    for _again in range(2):
        with pytest.raises(WorkerDied) as later:
            remote.model_load("m", ModelParams())
        assert later.value is not caught.value
        assert str(later.value) == str(caught.value)
    remote.context_free(context)
    remote.cancel(context)
    remote.close()
    with pytest.raises(Closed):
        remote.logs()


@pytest.mark.slow
def test_killed_worker_raises_worker_died(remote: Remote, context: ContextHandle) -> None:
    """It is killed between two calls, or during one."""
    os.kill(remote.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        remote.seq_pos_max(context, 0)
    assert caught.value.signal == 9
    other = Remote(fake())
    made = other.context_new(other.model_load("m", ModelParams()), ContextParams())
    timer = threading.Timer(0.2, os.kill, (other.pid, signal.SIGTERM))
    timer.start()
    with pytest.raises(WorkerDied, match="SIGTERM"):
        other.decode(made, [HANG], [0], None, (0,), None)
    other.close()
    timer.join(LONG)


@pytest.mark.slow
def test_silent_worker_is_ended_after_the_timeout(remote: Remote, context: ContextHandle) -> None:
    """A worker without a response for longer than the timeout is ended."""
    assert remote.timeout is None
    remote.timeout = 0.3
    with pytest.raises(WorkerTimeout, match=r"0\.3 s") as caught:
        remote.decode(context, [HANG], [0], None, (0,), None)
    assert isinstance(caught.value, WorkerDied)
    assert reaped(remote.pid)
    with pytest.raises(WorkerTimeout):
        remote.seq_pos_max(context, 0)


@pytest.mark.slow
def test_stopped_worker_times_out_during_a_large_message() -> None:
    """A worker that does not read is ended like one that does not respond."""
    remote = Remote(fake(), timeout=LONG)
    context = remote.context_new(remote.model_load("m", ModelParams()), ContextParams())
    remote.timeout = 0.5
    os.kill(remote.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout):
        remote.state_load(context, 0, bytes(8 << 20))
    assert reaped(remote.pid)
    remote.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"), [("abort", WorkerDied), ("fail", NativeError), ("hang", WorkerTimeout)]
)
def test_library_failing_to_load_leaves_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, fault: str, kind: type[NativeError]
) -> None:
    """Not even loading may affect the parent."""
    if fault == "hang":
        monkeypatch.setattr("pyllamakv.binding.remote.START", 3.0)
    before = fds()
    with pytest.raises(kind):
        Remote(fake(), env={"FAKE_PLK_INIT": fault})
    gc.collect()
    assert fds() == before


def test_missing_worker_interpreter_raises_load_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing interpreter, or one without the package, is named in the error."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LoadError, match="cannot start a worker"):
        Remote(fake())
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(LoadError, match=r"sys\.executable"):
        Remote(fake())
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no module named x >&2\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(WorkerDied, match="status 3") as caught:
        Remote(fake())
    assert caught.value.log == ("no module named x",)


def fds() -> int:
    """Count the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_ended_workers_leave_no_descriptors_and_zombies() -> None:
    """Closed, dropped, crashed or unused: no descriptor and no zombie remains."""
    Remote(fake()).close()
    before = fds()
    pids = []
    for end in ("close", "drop", "crash"):
        remote = Remote(fake())
        pids.append(remote.pid)
        if end == "crash":
            context = remote.context_new(remote.model_load("m", ModelParams()), ContextParams())
            with pytest.raises(WorkerDied):
                remote.decode(context, [ABORT], [0], None, (0,), None)
            remote.close()
        elif end == "close":
            remote.close()
            remote.close()
        del remote
        gc.collect()
    assert fds() == before
    assert all(reaped(pid) for pid in pids)


PARENT = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {root!r})
from pyllamakv.binding.remote import Remote
from pyllamakv.binding.protocol import ContextParams, ModelParams
remote = Remote(Path({library!r}))
context = remote.context_new(remote.model_load("m", ModelParams()), ContextParams())
print(remote.pid, flush=True)
if {hang}:
    remote.decode(context, [{token}], [0], None, (0,), None)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hang", [False, True])
def test_worker_ends_with_its_parent(hang: bool, tmp_path: Path) -> None:
    """However the parent ends, idle or in a call, the worker ends."""
    root = str(Path(__file__).resolve().parents[2])
    code = PARENT.format(root=root, library=str(fake()), hang=hang, token=HANG)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        time.sleep(0.2)
        parent.kill()
    until(lambda: gone(pid))


def test_the_environment_reaches_the_library(model: ModelHandle, remote: Remote) -> None:
    """Variables are set only in the worker, before the library is loaded."""
    assert remote.model_meta(model, "fake.env") is None
    other = Remote(fake(), env={"LLAMA_SET_ROWS": "0"})
    assert other.model_meta(other.model_load("m", ModelParams()), "fake.env") == "0"
    other.close()
    assert "LLAMA_SET_ROWS" not in os.environ


def test_worker_environment_disables_the_backtrace() -> None:
    """The debugger is disabled, and the package is found."""
    found = process.environment({"A": "b"})
    assert found["GGML_NO_BACKTRACE"] == "1"
    assert found["A"] == "b"
    assert process.environment({"GGML_NO_BACKTRACE": "0"})["GGML_NO_BACKTRACE"] == "0"


STREAMS = """
import os, sys
from pathlib import Path
for fd in range(3):
    os.close(fd)
sys.path.insert(0, {root!r})
from pyllamakv.binding.remote import Remote
Remote(Path({library!r})).close()
os._exit(42)
"""


def test_worker_starts_without_standard_streams(tmp_path: Path) -> None:
    """A program without stdin, stdout and stderr can have a worker too."""
    root = str(Path(__file__).resolve().parents[2])
    code = STREAMS.format(root=root, library=str(fake()))
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        timeout=300,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == 42


def test_modules_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user with a standard name is not imported by the worker."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Remote(fake()).close()
