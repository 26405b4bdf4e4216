"""Run git so that the same inputs give the same result on any machine.

Whatever the user, the system or a surrounding repository configured is switched off: variables,
config files, hooks, attributes, signing, paging and prompts. Identity and date are fixed, and git
never climbs above the folder it is started in: inside another work tree `git apply` would exit 0
and do nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import GitError
from pyllamakv.source import limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from git import Repo

NAME = "pyllamakv developers"
EMAIL = "pyllamakv@users.noreply.github.com"
DATE = "2026-11-20T00:00:00Z"
#: The same date in seconds, for `git fast-import`.
SECONDS = 1795132800

#: Exit status reported when git itself cannot be started, as a shell does.
_NOT_FOUND = 127
#: And when it was ended for taking too long, as by `timeout`.
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
    # Stores are made by whoever runs this, but a container may own them under another user.
    "safe.directory": "*",
}

#: What a fetch from a named URL keeps: a user's credentials, proxies and certificates.
_NETWORK_VARIABLES = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH")


#: Guards the process's own variables while GitPython runs, which cannot be told to drop any.
_PROCESS = threading.Lock()


def environment(*, network: bool = False) -> dict[str, str]:
    """Return the environment for git: nothing of the caller's ``GIT_*``, fixed identity and date.

    With ``network`` the user's own git config and certificates stay in force, because a private
    URL cannot be reached without them; hooks, signing and conversions stay off. Without it git
    reaches no other repository at all.
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
        # A folder's own .git/config may name a program that "brings" objects that are missing.
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
    """Run ``git args`` in ``folder``, whatever it returns, and give back status and both outputs.

    ``input`` is what git reads: bytes, text, or the path of a file. ``env`` is laid over the clean
    environment (for example another ``GIT_INDEX_FILE``). ``hold`` are descriptors that it inherits,
    to keep their locks for as long as it runs. ``bounded`` sets the limits of `limits`; with
    ``network`` none of address space. Raises GitError only when git cannot be started, or is not
    done within ``timeout`` seconds: it is ended with all that it started.
    """
    full = environment(network=network)
    place = folder.resolve()
    full["GIT_CEILING_DIRECTORIES"] = str(place.parent)
    full.update(env or {})
    command = ["git", *args]
    if bounded:
        command = limits.command(args, memory=not network)
        full.update(limits.environment())
    try:
        with ExitStack() as stack:
            data = input.encode("utf-8", "surrogateescape") if isinstance(input, str) else input
            stdin = subprocess.PIPE
            if isinstance(data, Path):
                stdin, data = stack.enter_context(data.open("rb")).fileno(), None
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    cwd=place,
                    env=full,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=tuple(hold),
                    process_group=None if timeout is None else 0,
                )
            )
            try:
                out, said = process.communicate(data, timeout)
            except subprocess.TimeoutExpired as error:
                with suppress(ProcessLookupError, PermissionError):  # it is gone just now
                    os.killpg(process.pid, signal.SIGKILL)
                words = f"it was not done within {timeout:g} s; is there a pipe among its files?"
                raise GitError(["git", *args], TIMED_OUT, words) from error
            except BaseException:
                process.kill()
                raise
            return subprocess.CompletedProcess(command, process.returncode, out, said)
    except FileNotFoundError as error:
        if not place.is_dir():
            raise GitError(command, _NOT_FOUND, f"there is no folder {place}") from error
        raise GitError(command, _NOT_FOUND, "git is not installed; install git") from error
    except NotADirectoryError as error:
        raise GitError(command, _NOT_FOUND, f"{place} is not a folder") from error


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
        said = (done.stderr or done.stdout).decode("utf-8", "replace")
        raise GitError(["git", *args], done.returncode, said)
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
    """Run ``git args`` in ``folder`` and return what it wrote, without the last line break.

    Undecodable bytes come as surrogate escapes. Raises GitError with the command, its exit status
    and its words when it fails and ``check`` is set.
    """
    options: dict[str, Any] = {"env": env, "network": network, "hold": hold, "bounded": bounded}
    out = git_bytes(folder, *args, input=input, check=check, timeout=timeout, **options)
    return out.decode("utf-8", "surrogateescape").removesuffix("\n")


@contextmanager
def repository(folder: Path, *, network: bool = False) -> Iterator[Repo]:
    """Open a repository with GitPython, under the same clean environment.

    It reads the repository's config by itself, without a bound: only for those of our own making.
    Raises GitError for a folder that is no repository, and for every command that fails.
    """
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    import git as gitpython

    clean = environment(network=network)
    clean["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    with _PROCESS:
        foreign = {k: v for k, v in os.environ.items() if k.startswith("GIT_") and k not in clean}
        for name in foreign:
            del os.environ[name]
        try:
            with gitpython.Repo(folder) as repo:
                repo.git.update_environment(**clean)
                yield repo
        except gitpython.GitCommandError as error:
            said = str(error.stderr or error.stdout or error)
            code = error.status if isinstance(error.status, int) else _NOT_FOUND
            command = error.command if isinstance(error.command, list) else [str(error.command)]
            raise GitError([str(word) for word in command], code, said) from error
        except (gitpython.InvalidGitRepositoryError, gitpython.NoSuchPathError) as error:
            msg = f"{folder} is no git repository"
            raise GitError(["git", "rev-parse"], 128, msg) from error
        finally:
            os.environ.update(foreign)
