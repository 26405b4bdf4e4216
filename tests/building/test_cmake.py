"""Test running cmake and ninja: progress, log, first error, full disk and interruption."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from building_kit import script

from pyllamakv.building import cmake
from pyllamakv.errors import CommandFailed, DiskFull, ToolMissing


@pytest.fixture
def job(tmp_path: Path) -> cmake.BuildSession:
    """Return a job in an empty directory."""
    (tmp_path / "build").mkdir()
    env = cmake.environment()
    return cmake.BuildSession(tmp_path / "build", tmp_path / "build.log", env)


def shell(body: str) -> list[str]:
    """Return the command that runs a shell script."""
    return ["/bin/sh", "-c", body]


def test_cmake_and_ninja_are_those_of_the_wheels() -> None:
    """Cmake and ninja are those of their packages, not of PATH."""
    for name in ("cmake", "ninja"):
        assert os.access(cmake.binary(name), os.X_OK)


def test_missing_ninja_package_error_names_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a missing package names pip."""
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(ToolMissing, match="pip install cmake ninja"):
        cmake.binary("ninja")


def test_package_without_its_program_is_a_missing_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package without its program is a missing tool."""
    monkeypatch.setattr("ninja.BIN_DIR", str(tmp_path))
    with pytest.raises(ToolMissing, match="has no program"):
        cmake.binary("ninja")


def test_build_environment_excludes_compiler_flags_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flags, dates and generators of the caller are removed from the environment; PATH is kept."""
    for name in ("CFLAGS", "SOURCE_DATE_EPOCH", "MAKEFLAGS", "CMAKE_GENERATOR", "GGML_NATIVE"):
        monkeypatch.setenv(name, "something")
    env = cmake.environment({"EXTRA": "1"})
    assert not {"CFLAGS", "SOURCE_DATE_EPOCH", "MAKEFLAGS", "CMAKE_GENERATOR"} & set(env)
    assert "GGML_NATIVE" not in env
    assert env["PATH"] == os.environ["PATH"]
    assert env["EXTRA"] == "1"
    assert env["LC_ALL"] == "C"


def test_ninja_status_lines_become_progress(job: cmake.BuildSession) -> None:
    """Ninja's status lines become progress steps, and the log has the complete output."""
    reports: list[tuple[str, int, int | None]] = []
    session = cmake.BuildSession(job.folder, job.log, job.env, lambda *facts: reports.append(facts))
    lines = "[plk 1/2] Building CXX object a/b.cpp.o\nwarning: something\n[plk 2/2] Linking l.so"
    cmake.run(session, shell(f"printf '{lines}\\n'"), "compiling")
    assert reports == [
        ("compiling", 0, None),
        ("compiling: Building b.cpp.o", 1, 2),
        ("compiling: Linking l.so", 2, 2),
    ]
    assert "warning: something" in job.log.read_text("utf-8")


def test_failure_keeps_command_code_and_error(job: cmake.BuildSession) -> None:
    """The error of a failed command has its status, first error line and the path of the log."""
    body = "echo 'a.cpp:3:1: error: no such thing'; echo 'b.cpp:1:1: error: later'; exit 7"
    with pytest.raises(CommandFailed) as caught:
        cmake.run(job, shell(body), "compiling")
    assert caught.value.code == 7
    assert caught.value.first_error == "a.cpp:3:1: error: no such thing"
    assert caught.value.command[0] == "/bin/sh"
    assert str(job.log) in str(caught.value)
    assert "later" in job.log.read_text("utf-8")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ok\nx.cpp:1:2: fatal error: y.h: No such file\nmore", "x.cpp:1:2: fatal error: y.h"),
        ("FAILED: a.o\nc++ a.cpp\na.cpp:4:5: error: bad\n", "a.cpp:4:5: error: bad"),
        ("ld: a.o: undefined reference to `f'\nerror: ld returned 1", "undefined reference"),
        ("CMake Error at CMakeLists.txt:3 (x):\n  Unknown command.\n\n\nend", "Unknown command"),
        ("FAILED: [code=1] a.o\nninja: build stopped", "FAILED: [code=1] a.o"),
        ("ninja: error: unknown target 'plk'", "unknown target"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "Killed signal"),
        ("all is well", ""),
    ],
)
def test_first_error_is_the_most_specific_line(output: str, expected: str) -> None:
    """The most specific line of compiler, linker, CMake and ninja is selected."""
    found = cmake.first_error(output)
    assert expected in found
    assert "end" not in found


def test_file_named_error_is_not_reported_as_an_error() -> None:
    """A file called error.cpp that compiles is not the first error."""
    output = "[plk 1/9] Building CXX object error.cpp.o\n-- error_handler: found\nx.cpp:1: error: y"
    assert cmake.first_error(output) == "x.cpp:1: error: y"


def test_full_disk_during_a_build_raises_disk_full(job: cmake.BuildSession) -> None:
    """A compiler that finds no space raises DiskFull with a hint, not a compile error."""
    body = "echo 'fatal error: error writing to a.s: No space left on device'; exit 1"
    with pytest.raises(DiskFull, match="PYLLAMAKV_HOME"):
        cmake.run(job, shell(body), "compiling")


def test_missing_program_raises_tool_missing(job: cmake.BuildSession, tmp_path: Path) -> None:
    """A missing program is a missing tool."""
    with pytest.raises(ToolMissing):
        cmake.run(job, [str(tmp_path / "absent")], "compiling")


def test_invalid_utf8_output_is_kept_in_the_log(job: cmake.BuildSession) -> None:
    """Bytes that are not UTF-8 do not stop the build and are kept in the log."""
    cmake.run(job, shell(r"printf '\377\376 done\n'"), "compiling")
    assert "done" in job.log.read_text("utf-8", errors="replace")


def test_interrupt_ends_all_children(job: cmake.BuildSession, tmp_path: Path) -> None:
    """If the caller is interrupted, the compilers end before the exception is raised."""
    pids = tmp_path / "pids"

    def interrupt(_what: str, done: int, _total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    session = cmake.BuildSession(job.folder, job.log, job.env, interrupt)
    body = f"sleep 600 & echo $! $$ >'{pids}'; echo '[plk 1/2] Building a'; wait"
    with pytest.raises(KeyboardInterrupt):
        cmake.run(session, shell(body), "compiling")
    for pid in map(int, pids.read_text("utf-8").split()):
        assert wait_for_end(pid), f"process {pid} is still there"


def wait_for_end(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    for _ in range(1200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.exists() and stat.read_text("utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def programs(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Replace cmake and ninja by a script."""
    path = script(folder / "program", body)
    monkeypatch.setattr(cmake, "binary", lambda _name: path)


def test_failed_configuration_is_repeated_with_fresh(
    job: cmake.BuildSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of a killed configure is discarded once; objects are kept."""
    source = tmp_path / "source"
    body = 'case "$*" in *--fresh*) echo new ;; *) echo "CMake Error: half"; exit 1 ;; esac\n'
    programs(monkeypatch, tmp_path, body)
    lines = f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\nCMAKE_CACHEFILE_DIR:INTERNAL={job.folder}\n"
    (job.folder / "CMakeCache.txt").write_text(lines, encoding="utf-8")
    cmake.configure(job, source, {})
    assert "new" in job.log.read_text("utf-8")


def test_moved_build_directory_is_configured_with_fresh(
    job: cmake.BuildSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CMake refuses a cache of another directory, so it is discarded first."""
    programs(monkeypatch, tmp_path, 'echo "$*"\n')
    (job.folder / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/x\n", "utf-8")
    cmake.configure(job, tmp_path / "source", {"A": "1"})
    assert "--fresh" in job.log.read_text("utf-8")
    assert "-DA=1" in job.log.read_text("utf-8")


def test_configuration_failure_in_an_empty_directory_is_not_retried(
    job: cmake.BuildSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed configure in an empty directory is not repeated."""
    programs(monkeypatch, tmp_path, 'echo "CMake Error: no"; exit 1\n')
    with pytest.raises(CommandFailed, match="CMake Error: no"):
        cmake.configure(job, tmp_path, {})
    assert job.log.read_text("utf-8").count("exit status") == 1


def test_held_lock_outlives_a_killed_caller(tmp_path: Path) -> None:
    """An inherited descriptor keeps its lock until the last child has ended."""
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "busy"
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    job = cmake.BuildSession(tmp_path, tmp_path / "log", cmake.environment(), held=(first,))
    pid_file = tmp_path / "pid"
    job_body = shell(f"echo $$ >'{pid_file}'; exec sleep 600")
    thread = threading.Thread(target=lambda: run_quietly(job, job_body), daemon=True)
    thread.start()
    while not pid_file.exists() or not pid_file.read_text("utf-8").strip():
        assert thread.is_alive()
        time.sleep(0.05)
    os.close(first)
    second = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(int(pid_file.read_text("utf-8")), signal.SIGKILL)
        thread.join(120)
        fcntl.flock(second, fcntl.LOCK_EX)
    finally:
        os.close(second)


def run_quietly(job: cmake.BuildSession, command: list[str]) -> None:
    """Run a command that is killed later."""
    with pytest.raises(CommandFailed):
        cmake.run(job, command, "sleeping")
