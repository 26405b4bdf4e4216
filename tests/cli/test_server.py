"""Test the verb `server`: finds a built server, runs it, and ends it at its own end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from cli_kit import cli
from server_kit import ending, gguf, serving

from pyllamakv.cli import main
from pyllamakv.errors import NotBuilt
from pyllamakv.server import server_artifact, server_process
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.source import verified

if TYPE_CHECKING:
    from collections.abc import Callable


class Found:
    """A fake built server."""

    id = "0.3.9-patched-cpu-0-1"

    def __init__(self, program: Path) -> None:
        self.program = program

    def check_program(self) -> Path:
        return self.program


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that makes a program the built server of every spec."""

    def use(program: Path) -> None:
        monkeypatch.setattr(server_artifact, "find_server", lambda _spec, **_: Found(program))

    return use


def test_server_print_path_prints_the_executable(built, tmp_path: Path, capsys) -> None:
    """It is used in the files of a service manager."""
    built(tmp_path / "llama-server")
    assert cli(capsys, "server", "0.3.9", "--print-path")[:2] == (0, f"{tmp_path}/llama-server\n")
    status, out, _ = cli(capsys, "server", "0.3.9", "--print-path", "--json")
    assert (status, json.loads(out)) == (0, {"path": f"{tmp_path}/llama-server", "id": Found.id})
    status, _, err = cli(capsys, "server", "0.3.9", "--print-path", "--", "-c", "512")
    assert status == 2
    assert "--print-path takes no arguments" in err


def test_unbuilt_server_error_names_the_build_command(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The error has the command that builds it; ``--portable`` selects the portable build."""
    wanted: list[object] = []

    def find(_spec: str, *, native: bool | None, **_options: object) -> None:
        wanted.append(native)
        raise NotBuilt("build it: pyllamakv build 0.3.9+patched --server")

    monkeypatch.setattr(server_artifact, "find_server", find)
    status, out, _ = cli(capsys, "server", "0.3.9", "--json")
    assert status == 2
    assert json.loads(out)["error"]["type"] == "NotBuilt"
    cli(capsys, "server", "0.3.9", "--portable")
    assert wanted == [None, False]


def test_arguments_and_errors_are_llama_servers(built, tmp_path: Path, capsys) -> None:
    """Arguments after `--` are passed on; its log is on stderr."""
    built(ending(tmp_path, "loading", "error: invalid argument: --bogus"))
    model = gguf(tmp_path)
    status, out, err = cli(capsys, "server", "0.3.9", "--", "-m", model, "--port", "0", "--bogus")
    assert (status, out) == (2, "")
    assert err.startswith("loading\n")
    assert "UsageError: llama-server refuses its arguments" in err
    status, out, _ = cli(capsys, "server", "0.3.9", "--json", "--", "-m", "/nowhere.gguf")
    assert (status, json.loads(out)["error"]["type"]) == (2, "ModelError")


def test_the_default_is_the_newest_verified_release(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It is used with and without arguments of llama-server, none of which is read as a release."""
    asked: list[str] = []

    def find(spec: str, **_options: object) -> Found:
        asked.append(spec)
        return Found(Path("/llama-server"))

    monkeypatch.setattr(server_artifact, "find_server", find)
    monkeypatch.setattr(verified, "newest", lambda: SimpleNamespace(name="0.3.36"))
    assert cli(capsys, "server", "--print-path")[:2] == (0, "/llama-server\n")
    status, out, _ = cli(capsys, "server", "--json", "--", "-m", "/nowhere.gguf")
    assert (status, json.loads(out)["error"]["type"]) == (2, "ModelError")
    assert asked == ["0.3.36", "0.3.36"]


def test_server_start_has_no_timeout(
    built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The verb has no timeout; Ctrl-C ends it."""
    clock = itertools.count(0.0, 1e6)
    monkeypatch.setattr(server_process.time, "monotonic", lambda: next(clock))
    answers = iter([False, False, True])
    monkeypatch.setattr(ServerProcess, "_healthy", lambda _self: next(answers))
    monkeypatch.setattr(ServerProcess, "wait", lambda _self: None)
    built(serving(tmp_path))
    assert cli(capsys, "server", "0.3.9", "--", "--port", "0")[0] == 0


@pytest.mark.parametrize(
    "option",
    [
        "-h",
        "--help",
        "--usage",
        "--version",
        "--list-devices",
        "-cl",
        "--cache-list",
        "--completion-bash",
    ],
)
def test_printing_options_are_passed_to_llama_server(
    built, tmp_path: Path, capfd, option: str
) -> None:
    """The output is on stdout, with the program's status; its end is not an error."""
    built(ending(tmp_path, "version: 1", status=3))
    assert cli(capfd, "server", "0.3.9", "--", "-c", "512", option) == (3, "version: 1\n", "")


#: Runs the verb `server` with the program in its argument.
_VERB = (
    "import signal, sys\n"
    "from pathlib import Path\n"
    "from types import SimpleNamespace\n"
    "from pyllamakv.cli import main\n"
    "from pyllamakv.server import server_artifact, server_process\n"
    # A shell that starts this test in the background ignores SIGINT.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "server_process.GRACE = float(sys.argv[2])\n"
    "found = SimpleNamespace(id='x', check_program=lambda: Path(sys.argv[1]))\n"
    "server_artifact.find_server = lambda spec, **_: found\n"
    "main.main(['server', '0.3.9', '--json', '--', '--port', '0'])\n"
)


def run_verb(program: Path, grace: float = 10.0) -> subprocess.Popen[bytes]:
    """Start the verb in its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", _VERB, str(program), str(grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])},
    )


@pytest.mark.slow
def test_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """It is killed; SIGTERM is the status of the verb."""
    program = serving(tmp_path, {"/health": (503, {"error": "Loading model"})})
    text = program.read_text("utf-8").replace(
        'print("ready"',
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()",
    )
    program.write_text(text, encoding="utf-8")
    owner = run_verb(program, grace=0.2)
    assert owner.stderr is not None
    pid = int(owner.stderr.readline())
    owner.send_signal(signal.SIGTERM)
    owner.communicate()
    assert owner.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_server(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Ctrl-C does, and so does the signal of a service manager."""
    owner = run_verb(serving(tmp_path))
    assert owner.stdout is not None
    facts = json.loads(owner.stdout.readline())
    assert facts["url"].startswith("http://127.0.0.1:")
    owner.send_signal(number)
    owner.communicate()
    assert owner.returncode == status
    with pytest.raises(ProcessLookupError):
        os.kill(facts["pid"], 0)
