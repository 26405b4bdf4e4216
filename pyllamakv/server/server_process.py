"""Run a llama-server as a child process: start, readiness, log, end.

The process ends with its owner: on Linux the kernel kills it when the owner dies. Its log is read
by a thread that keeps the last lines for errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import http
import http.client
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyllamakv.binding.process import describe
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import AddressInUse, LoadError, ModelError, ServerDied, UsageError
from pyllamakv.source import architectures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyllamakv.errors import KvError

#: Seconds that a server has to end after SIGTERM.
GRACE: Final = 10.0

#: Seconds that a server has to load its model and answer.
PATIENCE: Final = 600.0

#: Seconds in which the last lines of a log are read after the server has ended.
_DRAIN: Final = 2.0

#: The log lines that an error carries.
TAIL: Final = 20

#: What every release logs when a batch found no cells and is tried again in smaller parts.
RETRY: Final = "failed to find free space in the KV cache, retrying"

_MAGIC: Final = b"GGUF"
_PR_SET_PDEATHSIG: Final = 1

#: Options of the server that this module reads, with the environment variables for them.
_HOST: Final = (("--host",), "LLAMA_ARG_HOST")
_PORT: Final = (("--port",), "LLAMA_ARG_PORT")
_REUSE_PORT: Final = ("--reuse-port", "LLAMA_ARG_REUSE_PORT")
_MODEL: Final = (("-m", "--model"), "LLAMA_ARG_MODEL")

#: Options with which llama-server prints something and ends.
_PRINTING: Final = frozenset(
    {
        "-h",
        "--help",
        "--usage",
        "--version",
        "--list-devices",
        "--completion-bash",
        "-cl",
        "--cache-list",
    }
)

#: Values of a variable that set a flag, as llama-server reads them.
_TRUE: Final = ("on", "enabled", "true", "1")

#: Upstream's reason -> what to do about it. The first match decides.
_MODEL_ERRORS: Final = (
    (
        re.compile(r"(?:unknown pre-tokenizer type|unsupported model|key not found in model).*"),
        "this release cannot read the model; use a newer release",
    ),
    (
        re.compile(r"(?:tensor .* data is not within the file bounds|invalid magic).*"),
        "the file is damaged; download it again",
    ),
    (
        re.compile(r"failed to load model from .+"),
        "the file is missing or damaged; download it again",
    ),
    (
        re.compile(r"failed to (?:apply|load) lora adapter '.*"),
        "name an adapter of this model with --lora",
    ),
    (re.compile(r"error loading model:.*"), "check the model file"),
)
_ARCHITECTURE: Final = re.compile(r"unknown model architecture: '([^']*)'")
_USAGE: Final = re.compile(r"^error: (?:invalid|unknown) argument.*|error while handling .*", re.M)
_DOWNLOAD: Final = re.compile(r"failed to resolve commit for .*|.*built without CURL.*")
_NO_CONTEXT: Final = re.compile(r"failed to (?:initialize the |create[ _](?:llama_)?)context")
_NOT_LOADED: Final = re.compile(r"failed to load model|model loading error")

#: Servers before 0.3.9 abort after a failed start, mostly before their log is written.
_LOG_LOST: Final = "terminate called without an active exception"

#: The first line of a log with such a word has the cause. A warning is none.
_CAUSE: Final = re.compile(
    r"^(?!.*\bwarning\b).*\b(?:failed|error|cannot|requires|invalid|(?:un|not )supported)\b.*",
    re.I | re.M,
)
#: Time and level at the start of a line, in newer releases.
_STAMP: Final = re.compile(r"^[\d.]+ [A-Z] ", re.M)


class ServerProcess(ClosedOnExit):
    """A running llama-server. Closing it ends the process."""

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        sink: Callable[[str], None] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Start ``program`` with the arguments of llama-server; return when it answers.

        ``--port 0`` selects a free port. ``env`` is the environment of the server (default: that of
        this process). ``sink`` receives each line of the log. Raises AddressInUse or ModelError, if
        possible before the start; LoadError for a missing library; UsageError for arguments that
        the server refuses; and ServerDied if it ends, or is not ready after ``patience`` seconds.
        """
        whole = os.environ if env is None else env
        hosts, self.port = _address(arguments, whole)
        # A server that listens everywhere is reached here.
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hosts[0], hosts[0])
        _check_model(arguments, whole)
        self._command = [str(program), *_with_address(arguments, ",".join(hosts), self.port)]
        # Without this ggml starts a debugger on the dying process.
        self._env = {"GGML_NO_BACKTRACE": "1", **whole}
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: OSError | None = None
        self._started = threading.Event()
        #: How many batches found no cells and were tried again.
        self.retries = 0
        self._reader = threading.Thread(
            target=self._run, name=f"llama-server {self.port}", daemon=True
        )
        try:
            self._reader.start()
            self._started.wait()
            if self._refused is not None:
                raise LoadError(_not_started(program, self._refused)) from self._refused
            self._await(patience)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Return the address of the server for clients on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    @property
    def log(self) -> tuple[str, ...]:
        """Return the last lines of the log."""
        return tuple(self._tail)

    def ended(self, within: float = GRACE) -> bool:
        """Return whether the process has ended, or ends ``within`` seconds."""
        if self._child.poll() is None:
            self._reader.join(within)
        # A process that the server started can keep the log open.
        if self._reader.is_alive() and self._child.poll() is None:
            return False
        self._reader.join(_DRAIN)
        return True

    def wait(self) -> None:
        """Return when the server ends with status 0. Raises ServerDied for any other end."""
        # With a limit, since a wait without one delays signals to this thread.
        while not self.ended(1.0):
            pass
        if self._child.wait() != 0:
            raise self.death()

    def death(self) -> ServerDied:
        """Return the error that describes how the server ended."""
        status = self._child.wait()
        self._reader.join(_DRAIN)
        return ServerDied(
            self._with_log(f"llama-server {describe(status)}"),
            signal=max(0, -status),
            exitcode=None if status < 0 else status,
            log=self.log,
        )

    def close(self) -> None:
        """End the server: SIGTERM, then SIGKILL. A second call does nothing."""
        # After an interrupt, the thread may be about to start the process.
        self._started.wait(GRACE)
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._child.poll() is not None:
                break  # another process may have the id
            with contextlib.suppress(ProcessLookupError):
                # A server that starts other servers is their group's leader.
                os.killpg(self._child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(GRACE)
                break
        self._reader.join(_DRAIN)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _run(self) -> None:
        """Start the process and read its log until it ends.

        Linux kills the child when the *thread* that started it ends, so this one does.
        """
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                # A terminal's Ctrl-C is for the owner, which ends the server.
                process_group=0,
                preexec_fn=_end_with_owner() if sys.platform == "linux" else None,
            )
        except OSError as error:
            self._refused = error
            return
        finally:
            self._started.set()
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip()
                self.retries += RETRY in line
                if line:
                    self._tail.append(line)
                self._forward(line)
        self._process.wait()

    def _forward(self, line: str) -> None:
        """Pass a line to the sink, until the sink is closed: the server must not wait for it."""
        if self._sink is not None:
            try:
                self._sink(line)
            except (OSError, ValueError):
                self._sink = None

    def _await(self, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            if self.ended(0.0):
                raise self._startup_error()
            if self._healthy():
                return
            if time.monotonic() > until:
                msg = self._with_log(f"llama-server was not ready after {patience:g} s")
                raise ServerDied(msg, log=self.log)
            self._reader.join(0.05)

    def _with_log(self, what: str) -> str:
        """Return a message with the last line of the log, and the lines before it below."""
        *before, last = self._tail or ["it logged nothing"]
        return "\n  ".join((f"{what}: {last}", *(("before that:", *before) if before else ())))

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            # A server that loads a model answers 503 everywhere; --api-prefix moves this path.
            return connection.getresponse().status != http.HTTPStatus.SERVICE_UNAVAILABLE
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _startup_error(self) -> KvError:
        """Return the error for a server that ended before it answered."""
        text = _STAMP.sub("", "\n".join(self._tail))
        if "couldn't bind" in text:
            return AddressInUse(_in_use(self.host, self.port, "llama-server cannot bind it"))
        if missing := re.search(".*error while loading shared libraries.*", text):
            return LoadError(
                f"{missing[0]}; install the library (libcuda.so: the driver of the GPU), or build "
                "the server again",
                log=self.log,
            )
        if refused := _USAGE.search(text):
            return UsageError(f"llama-server refuses its arguments: {refused[0]}")
        if download := _DOWNLOAD.search(text):
            return UsageError(
                f"{download[0]}: this server downloads no models; fetch the file, and name it with "
                "-m"
            )
        if unknown := _ARCHITECTURE.search(text):
            remedy = architectures.remedy(unknown[1], server=True)
            return ModelError(f"{unknown[0]}: {remedy}", log=self.log, architecture=unknown[1])
        for pattern, remedy in _MODEL_ERRORS:
            if found := pattern.search(text):
                return ModelError(f"{found[0].strip()}: {remedy}", log=self.log)
        cause = _CAUSE.search(text)
        if cause and _NO_CONTEXT.search(text):
            return ModelError(
                f"{cause[0].strip()}: change the arguments of the context; if memory is short, use "
                "a smaller -c",
                log=self.log,
            )
        if cause and _NOT_LOADED.search(text):
            return ModelError(
                f"{cause[0].strip()}: check the model and the other files of the arguments",
                log=self.log,
            )
        if _LOG_LOST in text:
            return ModelError(
                "llama-server cannot load the model, and lost its log: use a smaller -c if memory "
                "is short, or a newer release; `pyllamakv run --variant RELEASE+patched --model "
                "FILE --prompt TEXT` reports why this release cannot load a file",
                log=self.log,
            )
        return self.death()


def prints_and_ends(arguments: Sequence[str]) -> bool:
    """Return whether llama-server only prints something for these arguments, such as its help."""
    return not _PRINTING.isdisjoint(arguments)


def run_directly(program: Path, arguments: Sequence[str]) -> int:
    """Run ``program`` with the files of this process; return its status as a shell does.

    Raises LoadError if it cannot be started.
    """
    try:
        status = subprocess.run([str(program), *arguments], check=False).returncode
    except OSError as error:
        raise LoadError(_not_started(program, error)) from error
    return 128 - status if status < 0 else status


def _not_started(program: Path, error: OSError) -> str:
    return f"{program} cannot be started: {error.strerror}; build it again"


def _end_with_owner() -> Callable[[], None]:
    """Return a function for a new child: let the kernel kill it when this process dies."""
    prctl = ctypes.CDLL(None).prctl
    owner = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != owner:
            os._exit(1)  # the owner died before the request

    return ask


def _option(
    arguments: Sequence[str], names: tuple[tuple[str, ...], str], env: Mapping[str, str]
) -> str | None:
    """Return the value of an option of the server: the last argument, else the variable."""
    words, variable = names
    found = env.get(variable)
    for name, value in itertools.pairwise(arguments):
        if name in words:
            found = value
    return found


def _address(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], int]:
    """Return hosts and port after checking that a server can listen there."""
    names = _option(arguments, _HOST, {})
    if names is None:
        names = env.get(_HOST[1]) or "127.0.0.1"
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    text = _option(arguments, _PORT, env) or "8080"
    if not hosts:
        raise UsageError(f"--host: expected an IP address, found {names!r}")
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"--port: expected a number from 0 to 65535, found {text!r}")
    flag, variable = _REUSE_PORT
    shared = flag in arguments or env.get(variable) in _TRUE
    port = int(text)
    for host in hosts:
        if host.endswith(".sock"):
            raise UsageError(f"--host {host}: sockets of files are not supported; use IP addresses")
        port = _bindable(host, port, shared=shared)
    return hosts, port


def _bindable(host: str, port: int, *, shared: bool) -> int:
    """Return the port, or a free one for 0, after binding it. Raises AddressInUse."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As the server itself does, or a port would be in use for a minute after its last end.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(place)
            return int(probe.getsockname()[1])
    except UnicodeError as error:
        raise UsageError(f"--host: expected an IP address, found {host!r} ({error})") from error
    except OSError as error:
        raise AddressInUse(_in_use(host, port, error.strerror or str(error))) from error


def _in_use(host: str, port: int, reason: str) -> str:
    return (
        f"cannot listen at {host}:{port} ({reason}): choose another --port (0 selects a free one) "
        "or an address of this machine"
    )


def _with_address(arguments: Sequence[str], host: str, port: int) -> list[str]:
    """Return the arguments with the port that was chosen, and with a host.

    An argument takes precedence over the configuration files that llama-server reads. Options are
    added at the start, because the last one given may lack its value.
    """
    words = list(arguments)
    for index, word in enumerate(words[:-1]):
        if word in _PORT[0]:
            words[index + 1] = str(port)
    for option, value in ((_PORT, str(port)), (_HOST, host)):
        if _option(words, option, {}) is None:
            words = [option[0][0], value, *words]
    return words


def _check_model(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise ModelError for a model file that is missing or is no GGUF file."""
    name = _option(arguments, _MODEL, env)
    if name is None:
        return  # the server may fetch one, or start without one
    try:
        with Path(name).open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(
            f"the model {name} cannot be read ({error.strerror}): name a GGUF file with -m"
        ) from error
    if start != _MAGIC:
        raise ModelError(f"the model {name} is not a GGUF file: it starts with {start!r}")
