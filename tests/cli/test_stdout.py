"""Test the command line if stdout is closed, broken or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyllamakv.cli.stdout import note
from pyllamakv.errors import DiskFull, UsageError

TRACE = Path(__file__).resolve().parents[2] / "examples" / "stock-fails.jsonl"
WORDS = [
    ["--help"],
    *(
        ["trace", *words]
        for words in (["view", "--help"], ["stats", str(TRACE)], ["view", str(TRACE), "--plain"])
    ),
]


def run(words: list[str], stdout: int | None, *, unbuffered: bool) -> tuple[int, str]:
    """Return status and stderr of a command; without ``stdout`` it is closed."""
    command = [sys.executable, "-m", "pyllamakv.cli.main", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    if stdout is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("words", WORDS)
def test_closed_pipe_exits_with_0(words, unbuffered) -> None:
    """Click and rich return 1, and Python 120 at exit; the run itself succeeded."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, err = run(words, writing, unbuffered=unbuffered)
    finally:
        os.close(writing)
    assert code == 0, err
    assert "Traceback" not in err and "Exception" not in err


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_closed_stdout_keeps_the_exit_status(unbuffered, tmp_path) -> None:
    """A closed pipe does not change an exit status that was set before."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, err = run(["trace", "view", str(tmp_path / "none")], writing, unbuffered=unbuffered)
        assert code == 2 and "ScriptError" in err
    finally:
        os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS)
def test_writes_to_a_closed_stdout_are_ignored(words) -> None:
    """`print` does the same."""
    code, err = run(words, None, unbuffered=True)
    assert code == 0 and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("words", WORDS)
def test_full_disk_is_reported_in_one_line(words, unbuffered) -> None:
    """The line has the exit status of a full disk."""
    with Path("/dev/full").open("wb") as full:
        code, err = run(words, full.fileno(), unbuffered=unbuffered)
    assert code == DiskFull.exit_code
    assert "cannot be written to stdout: No space left" in err
    assert "Traceback" not in err and "Exception" not in err


def test_broken_pipe_keeps_the_exit_status(monkeypatch) -> None:
    """A verdict before the last flush keeps its status, and so does an error."""
    from pyllamakv.cli import main

    reading, writing = os.pipe()
    os.close(reading)
    for ending, expected in ((lambda _: 1, 1), (_refuse, 2)):

        def verb(words, ending=ending) -> int:
            sys.stdout.write("said\n")
            return ending(words)

        monkeypatch.setattr(main, "_run", verb)
        with os.fdopen(os.dup(writing), "w") as pipe, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", pipe)
            with pytest.raises(SystemExit) as leaving:
                main.main(["trace", "stats"])
        assert leaving.value.code == expected
    os.close(writing)


def _refuse(*_) -> int:
    raise UsageError("no")


def test_note_without_stderr_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would end the thread that reads a server's log, and the server."""
    monkeypatch.setattr(sys, "stderr", None)
    note("a line of the log")
