"""Run cmake and ninja from their wheels, show progress, keep the log, find the first error."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import CommandFailed, DiskFull, ToolMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import IO

    from pyllamakv.source.progress import Progress


_HINT = "install the wheels into the Python that runs pyllamakv: `pip install cmake ninja`"

_STEP = re.compile(r"^\[plk (\d+)/(\d+)\] (.*)$")

#: Variables that a build must not inherit: flags, generators and dates would change the library,
#: but not its id. The compilers come from CC and CXX through `compiler.find`.
_DROPPED = re.compile(
    r"CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|CUDAFLAGS|CUDAARCHS|SOURCE_DATE_EPOCH|MAKEFLAGS|MFLAGS"
    r"|MAKELEVEL|NINJA_STATUS|NINJAFLAGS|DESTDIR|VERBOSE|CMAKE_\w+|GGML_\w+|LLAMA_\w+|GIT_\w+"
    r"|LANG|LANGUAGE|LC_\w+|GCC_COLORS|CLICOLOR\w*"
)

_ERRORS = (
    # A compiler's summary of a linker error has no cause; the linker's own lines precede it.
    re.compile(r"^.*?\berror\s*(?:[A-Z]*\d+)?: (?!ld returned|linker command).*$", re.M),
    re.compile(r"^.*undefined (?:reference to|symbol).*$", re.M),
    re.compile(r"^CMake Error.*$(?:\n(?!\n\S)(?:[ \t]+.*)?$){0,6}", re.M),
    re.compile(r"^.*: (?:cannot find|No such file or directory).*$", re.M),
    re.compile(r"^.*(?:internal compiler error|Killed signal|Segmentation fault).*$", re.M),
    re.compile(r"^ninja: error: .*$", re.M),
    re.compile(r"^FAILED: .*$", re.M),
)
_NO_ROOM = ("No space left on device", "Disk quota exceeded")


@dataclass(frozen=True)
class BuildSession:
    """The common state of a build: directory, log, environment and progress function.

    ``held`` are open file descriptors that the children inherit: a lock on one of them lasts
    until the last compiler has ended, even if this process is killed.
    """

    folder: Path
    log: Path
    env: Mapping[str, str]
    report: Progress | None = None
    held: tuple[int, ...] = ()


def binary(name: str) -> Path:
    """Return the program `cmake` or `ninja` from the wheel of that name.

    Raises ToolMissing. A program on PATH is not used, because its version is unknown.
    """
    attribute = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name]
    try:
        path = Path(getattr(importlib.import_module(name), attribute)) / name
    except (ImportError, AttributeError) as error:
        message = f"expected the Python package {name} with its program, found none; {_HINT}"
        raise ToolMissing(message, name, _HINT) from error
    if not os.access(path, os.X_OK):
        raise ToolMissing(f"the {name} wheel has no program at {path}; {_HINT}", name, _HINT)
    return path


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the caller's environment without variables that would change the result."""
    kept = {name: value for name, value in os.environ.items() if not _DROPPED.fullmatch(name)}
    return {**kept, "LC_ALL": "C", "NINJA_STATUS": "[plk %f/%t] ", **(extra or {})}


def configure(job: BuildSession, source: Path, definitions: Mapping[str, str]) -> None:
    """Configure ``source`` into the build directory; clear it and retry once if that fails.

    Raises CommandFailed with the first error, DiskFull, or ToolMissing.
    """
    cmake, ninja = binary("cmake"), binary("ninja")
    command = [str(cmake), "-S", str(source), "-B", str(job.folder), "-G", "Ninja"]
    command += ["--no-warn-unused-cli", "-Wno-dev", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    command += [f"-D{name}={value}" for name, value in sorted(definitions.items())]
    cache = job.folder / "CMakeCache.txt"
    existed = cache.exists()
    if existed and not _belongs(cache, source, job.folder):
        command.insert(1, "--fresh")
        existed = False
    try:
        run(job, command, "configuring")
    except CommandFailed:
        # A build that is killed in the configure step leaves incomplete CMake files.
        if not existed:
            raise
        command.insert(1, "--fresh")
        run(job, command, "configuring afresh")


def compile_targets(job: BuildSession, targets: Sequence[str], jobs: int) -> None:
    """Build the targets with ``jobs`` compilers at once; raise CommandFailed or DiskFull."""
    command = [str(binary("ninja")), "-C", str(job.folder), f"-j{jobs}", *targets]
    run(job, command, "compiling")


def run(job: BuildSession, command: Sequence[str], what: str) -> None:
    """Run one command, its output into the log, its steps to the report.

    Raises CommandFailed with the first error, DiskFull when the device is full, ToolMissing when
    the command cannot be started.
    """
    kept: deque[str] = deque(maxlen=4000)
    if job.report:
        job.report(what, 0, None)
    with job.log.open("a", encoding="utf-8", errors="replace") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        with _started(job, command) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                kept.append(line)
                step = _STEP.match(line)
                if step and job.report:
                    job.report(f"{what}: {_short(step[3])}", int(step[1]), int(step[2]))
            code = process.wait()
        log.write(f"# exit status {code}\n")
    if code != 0:
        raise _failure(job, command, code, "".join(kept), what)


@contextlib.contextmanager
def _started(job: BuildSession, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a process group of its own, and end the whole group on any exception."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(job.env),
            text=True,
            errors="replace",
            pass_fds=job.held,
            process_group=0,
        )
    except OSError as error:
        message = f"{command[0]} cannot be started: {error.strerror}; {_HINT}"
        raise ToolMissing(message, Path(command[0]).name, _HINT) from error
    try:
        yield process
    except BaseException:
        _end(process)
        raise
    finally:
        _close(process.stdout)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            return


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        stream.close()


def _failure(
    job: BuildSession, command: Sequence[str], code: int, output: str, what: str
) -> Exception:
    if any(sign in output for sign in _NO_ROOM):
        return DiskFull(
            f"the disk is full while {what} in {job.folder}; free space, or set PYLLAMAKV_HOME "
            "to a directory on another disk, and run the same command again"
        )
    found = first_error(output)
    message = (
        f"{what} failed: {Path(command[0]).name} exited with {code}\n"
        f"first error: {found or 'none found in the output'}\nwhole log: {job.log}"
    )
    return CommandFailed(message, command, code, output, found)


def first_error(output: str) -> str:
    """Return the first error of a compiler, a linker, CMake or ninja in ``output``, or nothing.

    Kinds are tried from the most telling to the least: a compiler's own words before ninja's.
    """
    for pattern in _ERRORS:
        found = pattern.search(output)
        if found:
            return "\n".join(line.rstrip() for line in found[0].splitlines() if line.strip())
    return ""


def _belongs(cache: Path, source: Path, folder: Path) -> bool:
    """Return whether a CMake cache was made for these folders; a moved one would stop CMake."""
    try:
        text = cache.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (
        f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" in text
        and f"CMAKE_CACHEFILE_DIR:INTERNAL={folder}\n" in text
    )


def _short(step: str) -> str:
    """Return a build step in short: `Building CXX object …/name.cpp.o` as verb and file name."""
    words = step.split()
    return f"{words[0]} {Path(words[-1]).name}" if len(words) > 1 else step
