"""Start a worker process, and see how it ended."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyllamakv.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: One message of the control channel: the context whose decode is to end, and its request.
CANCEL: Final = struct.Struct("<qQ")

#: Timeout in seconds for the start of a worker, and for its end after a request.
GRACE: Final = 10.0
START: Final = 120.0

_TAIL_BYTES: Final = 16384
_TAIL_LINES: Final = 40


class Process:
    """A worker: the process, two sockets, and the file with its stderr."""

    def __init__(self, library: Path, env: Mapping[str, str] | None = None) -> None:
        """Start a worker for a library; raises LoadError when no process can be started."""
        if not sys.executable:
            raise LoadError("a worker needs sys.executable, which this program does not set")
        self.requests, theirs = _pair()
        self.control, their_control = _pair()
        # A file instead of a pipe, because no thread reads it while the worker runs.
        self._stderr = tempfile.TemporaryFile(prefix="pyllamakv-worker-")  # noqa: SIM115
        with theirs, their_control:
            fds = (theirs.fileno(), their_control.fileno())
            try:
                self._child = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "pyllamakv.binding.worker",
                        *map(str, fds),
                        str(library),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=fds,
                    # A terminal's Ctrl-C must not end a worker that cannot ignore it yet: that
                    # would look like a crash.
                    process_group=0,
                    env=environment(env or {}),
                )
            except OSError as error:
                self.requests.close()
                self.control.close()
                self._stderr.close()
                raise LoadError(
                    f"cannot start a worker with {sys.executable}: {error.strerror}"
                ) from error
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """Return the worker's process id."""
        return self._child.pid

    @property
    def owned(self) -> bool:
        """Return whether this process started the worker; a fork of it did not."""
        return self._owner == os.getpid()

    def tail(self) -> tuple[str, ...]:
        """Return the last lines that the worker wrote to stderr or stdout."""
        if self._stderr.closed:
            return ()
        # Read in place: the worker shares the file's position.
        fd = self._stderr.fileno()
        size = os.fstat(fd).st_size
        text = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_TAIL_LINES:]

    def kill(self) -> int:
        """End the worker at once; return its status: negative for a signal."""
        self._child.kill()
        return self._child.wait()

    def wait(self) -> int:
        """Return the status of a worker that is about to end; one that lingers is killed."""
        try:
            return self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            return self.kill()

    def end(self) -> None:
        """Close everything and reap the worker. May be repeated."""
        self.requests.close()
        self.control.close()
        if self.owned:
            # A worker ends when its sockets are closed.
            self.wait()
        self._stderr.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that are none of the standard streams.

    If the standard streams of a program are closed, new descriptors could get their numbers.
    """
    one, two = socket.socketpair()
    return _moved(one), _moved(two)


def _moved(sock: socket.socket) -> socket.socket:
    if sock.fileno() >= 3:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, 3))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's environment: this one, the package's place, and ``more``."""
    env = dict(os.environ)
    # Without this ggml starts a debugger on the dying process.
    env["GGML_NO_BACKTRACE"] = "1"
    root = Path(__file__).resolve().parent.parent.parent
    if root.name not in {"site-packages", "dist-packages"}:
        # These directories are on the path anyway, and must not precede the standard library.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), env.get("PYTHONPATH"))))
    env.update(more)
    return env


def describe(status: int) -> str:
    """Describe in words how a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
