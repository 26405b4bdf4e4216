"""Run git so that the same inputs give the same result on any machine.

Every git command of the package is started here, through GitPython's `git.cmd.Git.execute`.
Settings of the user, the system and surrounding repositories are disabled: variables,
config files, hooks, attributes, signing, paging and prompts. Identity and date are fixed, and git
does not search parent directories for a repository: inside another work tree `git apply` would exit
0 and do nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import IO, TYPE_CHECKING, Any, cast

from pyllamakv.errors import GitError
from pyllamakv.printable import printable
from pyllamakv.source import git_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from git.cmd import Git

NAME = "pyllamakv developers"
EMAIL = "pyllamakv@users.noreply.github.com"
DATE = "2026-11-20T00:00:00Z"
#: The same date in seconds, for `git fast-import`.
SECONDS = 1795132800

#: Exit status reported when git itself cannot be started, as a shell does.
_NOT_FOUND = 127
_NO_GIT = (
    "git is not installed. The sources of llama.cpp need git, and builds need a C++ compiler as "
    "well; opening prebuilt libraries needs neither. Debian or Ubuntu: apt-get install git g++"
)
#: Exit status reported after a timeout, as by `timeout`.
TIMED_OUT = 124

_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.fsmonitor": "false",
    "core.quotePath": "false",
    "core.abbrev": "40",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    # The program that verifies signatures may be one that the .git/config of a source names.
    "log.showSignature": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "advice.detachedHead": "false",
    "init.defaultBranch": "main",
    "init.templateDir": "",
    "diff.renames": "true",
    "diff.algorithm": "myers",
    "merge.conflictStyle": "diff3",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    # The store may belong to another user, for example in a container.
    "safe.directory": "*",
}

#: Variables that a fetch from a URL keeps: credentials, proxies and certificates of the user.
_NETWORK_VARIABLES = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH")

#: Maximum number of bytes kept of what a streaming git writes to stderr.
_STDERR_BYTES = 64 << 10


def environment(*, network: bool = False) -> dict[str, str]:
    """Return the environment for git: fixed identity and date, without the caller's ``GIT_*``.

    With ``network``, the user's git config and certificates are used, because private URLs require
    them; hooks, signing and conversions stay disabled. Without it git reaches no other repository
    at all.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    if network:
        kept = (name for name in _NETWORK_VARIABLES if name in os.environ)
        env.update({name: os.environ[name] for name in kept})
        if "GIT_CONFIG_GLOBAL" in os.environ:
            env["GIT_CONFIG_GLOBAL"] = os.environ["GIT_CONFIG_GLOBAL"]
    else:
        env["GIT_CONFIG_GLOBAL"] = os.devnull
        env["GIT_CONFIG_NOSYSTEM"] = "1"
    env |= {
        # The .git/config of a source may name a program that fetches missing objects.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh" if network else "none",
        "GIT_EDITOR": "true",
        "GIT_SEQUENCE_EDITOR": "true",
        "GIT_PAGER": "cat",
        "GIT_AUTHOR_NAME": NAME,
        "GIT_AUTHOR_EMAIL": EMAIL,
        "GIT_AUTHOR_DATE": DATE,
        "GIT_COMMITTER_NAME": NAME,
        "GIT_COMMITTER_EMAIL": EMAIL,
        "GIT_COMMITTER_DATE": DATE,
        "LC_ALL": "C",
        "LANGUAGE": "C",
        "TZ": "UTC",
    }
    env["GIT_CONFIG_COUNT"] = str(len(_SETTINGS))
    for index, (key, value) in enumerate(_SETTINGS.items()):
        env[f"GIT_CONFIG_KEY_{index}"] = key
        env[f"GIT_CONFIG_VALUE_{index}"] = value
    return env


def run(
    folder: Path,
    *args: str,
    input: bytes | str | Path | None = None,
    env: Mapping[str, str] | None = None,
    network: bool = False,
    hold: Sequence[int] = (),
    bounded: bool = False,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run ``git args`` in ``folder``, and return exit status and both outputs.

    ``input`` is git's stdin: bytes, text, or the path of a file. ``env`` updates the clean
    environment (for example ``GIT_INDEX_FILE``). git inherits the descriptors in ``hold``, and with
    them their locks. ``bounded`` sets the limits of `git_limits`; with ``network``, the address
    space is not limited. Raises GitError only if git cannot be started or exceeds ``timeout``
    seconds; it is killed then, with its child processes. With ``network`` and a terminal, only git
    is killed: its child processes can ask on the terminal.
    """
    data = input.encode("utf-8", "surrogateescape") if isinstance(input, str) else input
    with ExitStack() as stack:
        stdin: int | IO[bytes] | None = None if data is None else subprocess.PIPE
        if isinstance(data, Path):
            stdin, data = stack.enter_context(data.open("rb")), None
        options: dict[str, Any] = {"env": env, "network": network, "bounded": bounded}
        # A program that asks on the terminal, such as ssh, would be stopped in another group.
        group = None if timeout is None or (network and _has_terminal()) else 0
        started = _start(folder, args, stdin=stdin, hold=hold, process_group=group, **options)
        process = stack.enter_context(_process(started))
        try:
            out, errors = process.communicate(data, timeout)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            hint = "check the network, or" if network else "check"
            words = f"it did not end within {timeout:g} s; {hint} for pipes among its files"
            raise GitError(["git", *args], TIMED_OUT, words) from error
        except BaseException:
            _kill(process)
            raise
        return subprocess.CompletedProcess(["git", *args], process.returncode, out, errors)


@contextmanager
def stream(
    folder: Path, *args: str, env: Mapping[str, str] | None = None, bounded: bool = False
) -> Iterator[IO[bytes]]:
    """Run ``git args`` in ``folder`` and yield its stdout, to be read to the end.

    git and its child processes are killed if the caller raises an exception. Otherwise, raises
    GitError if git fails, with the start of its stderr.
    """
    errors = bytearray()
    started = _start(folder, args, env=env, bounded=bounded, process_group=0)
    with _process(started) as process:
        assert process.stdout is not None
        # A full pipe of stderr would stop git while its stdout is read.
        drain = threading.Thread(target=_drain, args=(process.stderr, errors), daemon=True)
        try:
            drain.start()
        except RuntimeError as error:
            _kill(process)
            raise MemoryError("no thread could be started to read the errors of git") from error
        try:
            yield process.stdout
        except BaseException:
            _kill(process)
            raise
        finally:
            drain.join()
    if process.returncode:
        raise GitError(["git", *args], process.returncode, _message(bytes(errors)))


def _message(output: bytes) -> str:
    """Return what git wrote, for an error; a remote may send any byte."""
    return printable(output.decode("utf-8", "replace"), keep="\n\t")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, with its process group if it leads one."""
    with suppress(ProcessLookupError, PermissionError):  # it has just ended
        leads = os.getpgid(process.pid) == process.pid
        (os.killpg if leads else os.kill)(process.pid, signal.SIGKILL)


def _drain(pipe: IO[bytes], into: bytearray) -> None:
    while piece := pipe.read(_STDERR_BYTES):
        into += piece[: max(0, _STDERR_BYTES - len(into))]


def _start(
    folder: Path,
    args: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    network: bool = False,
    hold: Sequence[int] = (),
    bounded: bool = False,
    process_group: int | None = None,
) -> Git.AutoInterrupt:
    """Start ``git args`` in ``folder`` with GitPython. Raises GitError when that is impossible."""
    command = ["git", *args]
    place = folder.resolve()
    if not place.is_dir():
        problem = (
            f"{place} is not a directory" if place.exists() else f"there is no directory {place}"
        )
        raise GitError(command, _NOT_FOUND, problem)
    program = which("git")
    if program is None:
        raise GitError(command, _NOT_FOUND, _NO_GIT)
    full = environment(network=network)
    full["GIT_CEILING_DIRECTORIES"] = str(place.parent)
    full.update(env or {})
    # GitPython uses the current directory if the given one cannot be entered; with -C, git fails.
    words = ("-C", str(place), *args)
    line = [program, *words]
    if bounded:
        line = git_limits.command(program, words, memory=not network)
        full.update(git_limits.environment())
    # GitPython adds to the environment of the process and cannot remove variables.
    dropped = [n for n in os.environ if n.startswith("GIT_") and n not in full]
    foreign = [word for n in dropped if not n.startswith("GIT_PYTHON_") for word in ("-u", n)]
    if foreign:
        line = ["/usr/bin/env", *foreign, *line]
    # GitPython takes 40 ms to import, and asks git for its version.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from git.cmd import Git
    from git.exc import GitCommandNotFound

    try:
        started = Git().execute(
            line,
            istream=stdin,  # type: ignore[arg-type]
            as_process=True,
            shell=False,
            env=full,
            pass_fds=tuple(hold),
            process_group=process_group,
        )
        return cast("Git.AutoInterrupt", started)
    except GitCommandNotFound as error:
        raise GitError(command, _NOT_FOUND, f"cannot start {line[0]}: {error}") from error


def _process(started: Git.AutoInterrupt) -> subprocess.Popen[bytes]:
    """Return the process that GitPython started; it is terminated with the last reference."""
    assert started.proc is not None
    return started.proc


def git_bytes(
    folder: Path,
    *args: str,
    input: bytes | str | Path | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    network: bool = False,
    hold: Sequence[int] = (),
    bounded: bool = False,
    timeout: float | None = None,
) -> bytes:
    """Run git like `git`, but return its output as the bytes it wrote."""
    options: dict[str, Any] = {"network": network, "hold": hold, "bounded": bounded}
    done = run(folder, *args, input=input, env=env, timeout=timeout, **options)
    if check and done.returncode != 0:
        raise GitError(["git", *args], done.returncode, _message(done.stderr or done.stdout))
    return done.stdout


def git(
    folder: Path,
    *args: str,
    input: bytes | str | Path | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    network: bool = False,
    hold: Sequence[int] = (),
    bounded: bool = False,
    timeout: float | None = None,
) -> str:
    """Run ``git args`` in ``folder`` and return its output, without the last line break.

    Undecodable bytes become surrogate escapes. With ``check``, raises GitError with the command,
    its exit status and its stderr if it fails.
    """
    options: dict[str, Any] = {"env": env, "network": network, "hold": hold, "bounded": bounded}
    out = git_bytes(folder, *args, input=input, check=check, timeout=timeout, **options)
    return out.decode("utf-8", "surrogateescape").removesuffix("\n")
