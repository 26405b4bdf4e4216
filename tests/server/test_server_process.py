"""Test that a server starts, reports errors, and never outlives its owner."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_kit import ending, gguf, program, serving

from pyllamakv.errors import AddressInUse, LoadError, ModelError, ServerDied, UsageError
from pyllamakv.server import server_process
from pyllamakv.server.server_process import (
    RETRY,
    ServerProcess,
    prints_and_ends,
    run_directly,
)


def get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.status)


def gone(pid: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_server_runs_until_it_is_closed(tmp_path: Path) -> None:
    """It is ready when the constructor returns, and its log reaches the sink."""
    lines: list[str] = []
    with ServerProcess(
        serving(tmp_path, log=f"srv: {RETRY} with"), ["--port", "0"], sink=lines.append
    ) as server:
        assert get(f"{server.url}/health") == 200
        assert server.port > 0
        pid = server.pid
        assert not server.ended(0.0)
    assert gone(pid)
    assert server.ended()
    assert lines == list(server.log)
    assert server.retries == 1
    server.close()


@pytest.mark.slow
def test_the_port_of_the_arguments_is_used(tmp_path: Path) -> None:
    """Without one, the environment decides, as for llama-server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = serving(tmp_path)
    with ServerProcess(program, ["--port", str(port)]) as server:
        assert server.url == f"http://127.0.0.1:{port}"
    with ServerProcess(program, env={**os.environ, "LLAMA_ARG_PORT": str(port)}) as server:
        assert server.port == port


def test_a_closed_terminal_does_not_end_the_server(tmp_path: Path) -> None:
    """Its log is still read, or the server would block when the pipe is full."""

    def closed(_line: str) -> None:
        raise BrokenPipeError

    with ServerProcess(serving(tmp_path), ["--port", "0"], sink=closed) as server:
        assert get(f"{server.url}/health") == 200
        assert server.log == ("ready",)


def test_server_with_an_api_prefix_is_ready(tmp_path: Path) -> None:
    """It has --api-prefix; a server that loads a model responds with 503 at every path."""
    program = serving(tmp_path, {"/health": (404, {"error": "no such path"})})
    with ServerProcess(program, ["--port", "0"]) as server:
        assert not server.ended(0.0)


def test_server_ended_by_a_signal_is_reported(tmp_path: Path) -> None:
    """The error has its signal and the last lines of its log."""
    with ServerProcess(serving(tmp_path, log="last words"), ["--port", "0"]) as server:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"{server.url}/die")
        with pytest.raises(ServerDied, match=r"SIGABRT[^$]*last words") as caught:
            server.wait()
    assert caught.value.signal == signal.SIGABRT
    assert caught.value.exitcode is None
    assert "last words" in caught.value.log


def test_a_server_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    """The error has its status."""
    with pytest.raises(ServerDied, match=r"ended with status 7[^$]*what a pity") as caught:
        ServerProcess(ending(tmp_path, "what a pity", status=7), ["--port", "0"])
    assert caught.value.exitcode == 7


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    """The error has the log."""
    program = serving(tmp_path, {"/health": (503, {"error": "Loading model"})}, log="loading")
    with pytest.raises(ServerDied, match="not ready after 0 s"):
        ServerProcess(program, ["--port", "0"], patience=0.0)


def test_interrupt_while_a_model_loads_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process remains."""
    pids: list[int] = []

    def interrupted(server: ServerProcess) -> bool:
        pids.append(server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(ServerProcess, "_healthy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(serving(tmp_path), ["--port", "0"])
    assert gone(pids[0])


def test_interrupt_while_starting_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may start the process after the interrupt; it is ended anyway."""
    pids: list[int] = []
    start = subprocess.Popen

    class Interrupted(threading.Event):
        waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            begun.set()
            return super().wait(timeout)

    def late(*args: Any, **options: Any) -> Any:
        assert begun.wait(60)
        made = start(*args, **options)
        pids.append(made.pid)
        return made

    begun = threading.Event()
    replaced = SimpleNamespace(Event=Interrupted, Thread=threading.Thread)
    monkeypatch.setattr(server_process, "threading", replaced)
    monkeypatch.setattr(server_process.subprocess, "Popen", late)
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(serving(tmp_path), ["--port", "0"])
    assert gone(pids[0])


#: Starts a process that keeps the log open.
_FORK = "import os, signal\nif os.fork() == 0:\n    signal.pause()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="stubs are Python programs that fork")
def test_server_end_is_noticed_while_its_log_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a dead server has started still holds it."""
    monkeypatch.setattr(server_process, "_DRAIN", 0.1)
    path = serving(tmp_path)
    path.write_text(path.read_text("utf-8").replace("\n", f"\n{_FORK}", 1), encoding="utf-8")
    with ServerProcess(path, ["--port", "0"]) as server:
        try:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                get(f"{server.url}/die")
            assert server.ended(5.0)
            with pytest.raises(ServerDied, match="SIGABRT"):
                server.wait()
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="stubs are Python programs that fork")
def test_failed_start_is_noticed_while_the_log_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb has no timeout for a start."""
    monkeypatch.setattr(server_process, "_DRAIN", 0.1)
    body = f"{_FORK}print(os.getpgid(0), flush=True)\nraise SystemExit(7)\n"
    lines: list[str] = []
    try:
        with pytest.raises(ServerDied, match="ended with status 7"):
            ServerProcess(
                program(tmp_path, body), ["--port", "0"], sink=lines.append, patience=20.0
            )
    finally:
        os.killpg(int(lines[0]), signal.SIGKILL)


def test_a_process_that_has_ended_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have its id."""
    sent: list[int] = []
    with ServerProcess(serving(tmp_path), ["--port", "0"]) as server:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"{server.url}/die")
        assert server.ended()
        monkeypatch.setattr(os, "killpg", lambda pid, _number: sent.append(pid))
    assert sent == []


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("load: unknown model architecture: 'mystery'", ModelError, "no pinned release knows it"),
        ("load: unknown model architecture: 'gemma3n'", ModelError, "pyllamakv build .* --server"),
        ("error loading model: no tensors", ModelError, "no tensors: check the model file"),
        ("main: couldn't bind HTTP server socket, port: 1", AddressInUse, "choose another --port"),
        ("error: invalid argument: --bogus", UsageError, r"refuses its arguments.*--bogus"),
        ("x: error while loading shared libraries: libcuda.so.1", LoadError, "driver of the GPU"),
        ('error while handling argument "-c": stoi', UsageError, "argument .-c."),
        # 0.3.9: a cache larger than the memory.
        (
            "init: failed to initialize the context: std::bad_alloc\n"
            "srv    load_model: failed to load model, '/model.gguf'",
            ModelError,
            r"^init: .*bad_alloc: .* use a smaller -c",
        ),
        # b11549: an invalid setting. The second line is no invalid argument.
        (
            "0.00.009.246 E init: quantized V cache requires flash_attn to be enabled\n"
            "0.00.009.323 E fit: encountered an error while trying to fit params: failed\n"
            "0.00.009.939 E srv    load_model: failed to create_context with model 'x'",
            ModelError,
            "^init: quantized V cache requires flash_attn to be enabled: change",
        ),
        (
            "warning: failed to mlock a buffer\n"
            "clip: failed to load CLIP model from x. Does this file exist?\n"
            "main: exiting due to model loading error",
            ModelError,
            r"^clip: .*exist\?: check the model and the other files",
        ),
        # 0.3.8, with SIGABRT.
        ("terminate called without an active exception", ModelError, "lost its log: .* newer"),
        ("x: failed to load model from /my models/a.gguf", ModelError, "/my models/a.gguf: the"),
        ("init: failed to apply lora adapter 'a.gguf'", ModelError, r"'a\.gguf': .* with --lora"),
        ("load: failed to load model from draft.gguf", ModelError, "draft.gguf: .* missing or"),
        (
            "0.00.015.885 W get_repo_files: failed to resolve commit for a/b\n"
            "0.00.017.814 E srv    load_model: failed to load model, ''",
            UsageError,
            "a/b: this server downloads no models; .* -m",
        ),
    ],
)
def test_log_line_of_a_failed_start_becomes_a_typed_error(
    tmp_path: Path, line: str, error: type[Exception], message: str
) -> None:
    """Upstream's log before the end becomes a typed error with a remedy."""
    with pytest.raises(error, match=message):
        ServerProcess(ending(tmp_path, "loading", line, "bye"), ["--port", "0"])


def test_a_used_port_is_refused_before_the_start(tmp_path: Path) -> None:
    """So is an address of another machine."""
    program = tmp_path / "never started"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            ServerProcess(program, ["--port", port])
    with pytest.raises(AddressInUse, match="an address of this machine"):
        ServerProcess(program, ["--host", "192.0.2.1", "--port", "0"])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", r"http://127\.0\.0\.1:\d+"),
        ("::", r"http://\[::1\]:\d+"),
        ("::1", r"http://\[::1\]:\d+"),
    ],
)
def test_client_address_of_a_wildcard_host_is_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    """A server that listens on all addresses is accessed on this machine."""
    monkeypatch.setattr(server_process, "_bindable", lambda _host, _port, *, shared: 0)
    monkeypatch.setattr(ServerProcess, "_healthy", lambda _server: True)
    with ServerProcess(serving(tmp_path), ["--host", host, "--port", "0"]) as server:
        assert re.fullmatch(url, server.url)


def test_host_argument_is_always_passed(tmp_path: Path) -> None:
    """Without one, a configuration file of llama-server could select all networks."""
    program = ending(tmp_path, "unused")
    program.write_text(
        program.read_text("utf-8").replace("'unused'", "__import__('sys').argv[1:]"),
        encoding="utf-8",
    )
    for words, env, expected in (
        ([], {}, "127.0.0.1"),
        ([], {"LLAMA_ARG_HOST": "localhost"}, "localhost"),
        ([], {"LLAMA_ARG_HOST": ""}, "127.0.0.1"),
        (["--host", "127.0.0.1,localhost"], {}, "127.0.0.1,localhost"),
    ):
        with pytest.raises(ServerDied) as caught:
            ServerProcess(program, [*words, "--port", "0"], env=env)
        given = caught.value.log[0]
        assert given.count("'--host'") == 1
        assert f"'--host', '{expected}'" in given


def test_an_option_without_its_value_stays_the_last_argument(tmp_path: Path) -> None:
    """An added argument does not become its value."""
    program = ending(tmp_path, "unused")
    program.write_text(
        program.read_text("utf-8").replace("'unused'", "__import__('sys').argv[-2:]"),
        encoding="utf-8",
    )
    with pytest.raises(ServerDied) as caught:
        ServerProcess(program, ["--port", "0", "-c", "512", "-m"], env={})
    assert caught.value.log == ("['512', '-m']",)


def test_each_host_of_a_list_is_probed(tmp_path: Path) -> None:
    """The first one is that of the URL, and the port must be free on all."""
    with ServerProcess(
        serving(tmp_path), ["--host", " 127.0.0.1, localhost", "--port", "0"]
    ) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
    program = tmp_path / "never started"
    with pytest.raises(AddressInUse, match=r"192\.0\.2\.1"):
        ServerProcess(program, ["--host", "127.0.0.1,192.0.2.1", "--port", "0"])


def test_servers_may_share_a_port(tmp_path: Path) -> None:
    """They may with ``--reuse-port``, or its variable; another program's port is still refused."""
    program = tmp_path / "never started"
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        first.listen()
        words = ["--port", str(first.getsockname()[1])]
        with pytest.raises(LoadError, match="never started"):
            ServerProcess(program, [*words, "--reuse-port"])
        with pytest.raises(LoadError, match="never started"):
            ServerProcess(program, words, env={"LLAMA_ARG_REUSE_PORT": "1"})
        with pytest.raises(AddressInUse):
            ServerProcess(program, words)


def test_an_unusable_model_is_refused_before_the_start(tmp_path: Path) -> None:
    """Check a missing file, and one that is not a GGUF file."""
    program = tmp_path / "never started"
    for words in (["-m", "/nowhere.gguf"], ["--model", str(tmp_path)]):
        with pytest.raises(ModelError, match="cannot be read"):
            ServerProcess(program, ["--port", "0", *words])
    with pytest.raises(ModelError, match="not a GGUF file"):
        ServerProcess(program, ["--port", "0"], env={"LLAMA_ARG_MODEL": __file__})


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "x"],
        ["--port", "65536"],
        ["--host", "/x.sock"],
        ["--host", "127.0.0.1,/x.sock", "--port", "0"],
        ["--host", " ,"],
        ["--host", "", "--port", "0"],
        ["--host", 64 * "x", "--port", "0"],
    ],
)
def test_an_invalid_address_is_refused(tmp_path: Path, words: list[str]) -> None:
    """It is before the start."""
    with pytest.raises(UsageError, match=r"^--(host|port)"):
        ServerProcess(tmp_path / "never started", words)


def test_missing_server_program_raises_load_error(tmp_path: Path) -> None:
    """The error has the path."""
    with pytest.raises(LoadError, match="never started"):
        ServerProcess(tmp_path / "never started", ["--port", "0", "-m", str(gguf(tmp_path))])


def test_printing_options_run_the_program_directly(tmp_path: Path) -> None:
    """The status is that of a shell, and a program that cannot be started is a LoadError."""
    assert prints_and_ends(["-m", "x", "--version"])
    assert not prints_and_ends(["-m", "version"])
    aborting = program(tmp_path, "import os\nos.abort()\n")
    assert run_directly(aborting, ["--version"]) == 128 + signal.SIGABRT
    with pytest.raises(LoadError, match="never started"):
        run_directly(tmp_path / "never started", [])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the server")
def test_a_server_ends_with_a_killed_owner(tmp_path: Path) -> None:
    """SIGKILL leaves no orphan, even if the starting thread has ended."""
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from pyllamakv.server.server_process import ServerProcess\n"
        "def start(): print(ServerProcess(Path(sys.argv[1]), ['--port', '0']).pid, flush=True)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start(); thread.join()\n"
        "print(sys.stdin.read())\n"
    )
    root = str(Path(server_process.__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(serving(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    handle = os.pidfd_open(pid)
    owner.kill()
    owner.communicate()
    # The descriptor is readable when the process has ended.
    try:
        assert select.select([handle], [], [], 60)[0]
    finally:
        os.close(handle)
    assert gone(pid)
