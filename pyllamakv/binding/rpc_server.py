"""Serve a device of this machine over RPC, from a separate process.

llama.cpp's server accepts one client after another, has no authentication, and cannot be stopped by
a request. Therefore, the caller owns the process and ends it. It also ends with its owner.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from pyllamakv.binding import arguments
from pyllamakv.binding.codes import Code
from pyllamakv.binding.library import MAX_TIMEOUT, find_library, first_gpu, variables
from pyllamakv.binding.remote import Remote
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    DeviceLost,
    KvError,
    LoadError,
    NativeError,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LOOPBACK: Final = "127."


class RpcServer(ClosedOnExit):
    """A process that serves one device, started with the library that clients use."""

    def __init__(
        self,
        where: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        device: str | None = None,
        memory: int = 0,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        patience: float = 60.0,
    ) -> None:
        """Serve ``device`` of a library at host:port; return when it is ready.

        ``where`` is the directory of a variant, or a library. ``device`` None is the first GPU of a
        GPU variant, else the CPU. ``port`` 0 selects a free one. ``memory`` is the size in bytes
        reported to clients (0: the device's; later releases always report that). ``threads`` limits
        the compute threads. Raises UsageError for an address that cannot be used, LoadError for a
        library that cannot be loaded, and DeviceLost if the server ends or does not answer for
        ``patience`` seconds.
        """
        where = arguments.path("where", where)
        host = arguments.c_text("host", host)
        port = arguments.integer("port", port, 0, 65535)
        device = arguments.c_text_or_none("device", device)
        memory = arguments.integer("memory", memory, 0, 2**63 - 1)
        threads = arguments.whole_or_none("threads", threads, 1, arguments.INT32)
        patience = arguments.number("patience", patience, 0.0, MAX_TIMEOUT)
        more = variables(env) or {}
        #: The address for ``rpc_servers``: host:port.
        self.endpoint = _free(host, port)
        self._error: KvError | None = None
        path, manifest = find_library(where)
        self._native = Remote(path, env={**_threads(threads), **more})  # type: ignore[abstract]
        try:
            if device is None and manifest is not None:
                device = first_gpu(self._native, manifest)
            self._thread = threading.Thread(
                target=self._serve, args=(device, memory), name=f"rpc {self.endpoint}", daemon=True
            )
            self._thread.start()
            self._await(patience)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the server process."""
        return self._native.pid

    @property
    def alive(self) -> bool:
        """Whether the server process is running."""
        return self._thread.is_alive()

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can connect. Clients can access all memory of the server."""
        return not self.endpoint.startswith(_LOOPBACK)

    def wait(self, timeout: float | None = None) -> None:
        """Return after ``timeout`` seconds. Raises DeviceLost if the server ends before."""
        if timeout is not None:
            timeout = arguments.number("timeout", timeout, 0.0, MAX_TIMEOUT)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._ended()

    def close(self) -> None:
        """Stop the process. Clients lose their data on it. A second call does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<Server at {self.endpoint}{'' if self.alive else ', ended'}>"

    def _serve(self, device: str | None, memory: int) -> None:
        try:
            self._native.rpc_serve(self.endpoint, device, memory)
        except KvError as error:
            self._error = error

    def _await(self, patience: float) -> None:
        host, _, port = self.endpoint.rpartition(":")
        # A server on all addresses is probed on loopback.
        here = "127.0.0.1" if host == "0.0.0.0" else host
        until = time.monotonic() + patience
        while self._thread.is_alive():
            try:
                socket.create_connection((here, int(port)), timeout=1).close()
            except OSError as error:
                if time.monotonic() > until:
                    message = f"the RPC server at {self.endpoint} does not answer: {error}"
                    raise DeviceLost(message) from error
                self._thread.join(0.05)
                continue
            return
        self._ended()

    def _ended(self) -> None:
        error = self._error
        if isinstance(error, LoadError | Unsupported | UsageError):
            raise error
        if isinstance(error, NativeError) and error.code == Code.EINVAL:
            raise UsageError(str(error)) from error
        reason = f": {error}" if error else ""
        message = f"the RPC server at {self.endpoint} ended{reason}"
        raise DeviceLost(message, log=getattr(error, "log", ())) from error


def _free(host: str, port: int) -> str:
    """Return address:port after checking that it is free. Raises UsageError with the remedy.

    llama.cpp accepts numeric addresses only, and would treat a name as an invalid one.
    """
    try:
        place = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as probe:
            # As in the server: without this, the port stays in use for a minute after a server has
            # ended.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            address, found = probe.getsockname()
    except (OSError, UnicodeError) as error:
        message = (
            f"cannot listen at {arguments.shown(host)}:{port} ({error}): name an IPv4 "
            "address of this machine, or a "
            "name that has one, and a port that is free (0 takes one)"
        )
        raise UsageError(message) from error
    return f"{address}:{found}"


def _threads(count: int | None) -> dict[str, str]:
    """Return the environment variable with the number of a server's threads."""
    return {} if count is None else {"PLK_RPC_THREADS": str(count)}
