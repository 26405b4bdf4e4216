"""Run a library in a separate process: ``python -m pyllamakv.binding.worker FD FD LIBRARY``.

The first descriptor is a socket for requests and replies (`wire`). The second one carries
cancellations, which must be received during a request. The worker ends when its parent closes them
or ends.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

from pyllamakv.binding.forwarding import operations
from pyllamakv.binding.local import Local
from pyllamakv.binding.process import CANCEL
from pyllamakv.binding.protocol import ContextHandle, Native
from pyllamakv.binding.wire import Channel, pack, pack_error, unpack
from pyllamakv.errors import KvError, UsageError

#: Operations that a request may name.
OPERATIONS: Final = frozenset({*operations(Native), "rpc_serve"})
#: Operations that must not run while a cancel uses a context.
_FREES: Final = frozenset({"context_free", "model_free", "close"})
#: Milliseconds between checks that the parent is alive, in case a fork keeps the sockets open.
_LOOK_MS: Final = 5000


class Worker:
    """Serve one library to one parent."""

    def __init__(self, requests: socket.socket, control: socket.socket) -> None:
        self._channel = Channel(requests)
        self._control = control
        self._records: list[tuple[int, str]] = []
        #: The number of the last request.
        self._number = 0
        #: Held while a cancel uses a context, while contexts are freed, and as a request begins.
        self._beginning = threading.Lock()
        self._parent = os.getppid()

    def run(self, library: Path) -> NoReturn:
        """Load the library, report its facts, and answer requests until the parent has ended."""
        try:
            native = Local(library, sink=self._records.extend)
        except KvError as error:
            self._reply(0, error=error)
            leave(1)
        threading.Thread(target=self._listen, args=(native,), daemon=True).start()
        self._reply(0, native.about)
        while True:
            try:
                number, header, body = self._channel.receive()
            except (EOFError, ConnectionError):
                leave(0)
            operation = header[0]
            with self._beginning:
                self._number = number
            try:
                if operation not in OPERATIONS:
                    raise UsageError(f"{operation} is not an operation of a library")
                arguments = [unpack(item, body) for item in header[1:]]
                call = getattr(native, operation)
                if operation in _FREES:
                    with self._beginning:
                        result = call(*arguments)
                else:
                    result = call(*arguments)
                self._reply(number, result)
            except (KvError, ValueError, TypeError, OverflowError, MemoryError) as error:
                self._reply(number, error=error)
            except ConnectionError:
                leave(0)
            except Exception as error:
                traceback.print_exc()
                self._reply(number, error=error)
            if operation == "close":
                leave(0)

    def _reply(self, number: int, result: Any = None, error: BaseException | None = None) -> None:
        body: list[Any] = []
        header = [0, pack(result, body)] if error is None else [1, pack_error(error, body)]
        if self._records:
            header.append(self._records[:])
            self._records.clear()
        self._channel.send(number, header, body)

    def _listen(self, native: Local) -> None:
        """Forward cancellations; end the process when the parent has ended."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            if not poller.poll(_LOOK_MS):
                if os.getppid() != self._parent:
                    leave(1)
                continue
            try:
                message = self._control.recv(CANCEL.size, socket.MSG_WAITALL)
            except ConnectionError:
                message = b""
            if len(message) < CANCEL.size:
                leave(0)
            context, number = CANCEL.unpack(message)
            try:
                with self._beginning:
                    if number == self._number:  # else it has ended, and this one must not
                        native.cancel(ContextHandle(context))
            except KvError:
                continue  # it was closed: nothing is left to cancel


def leave(status: int) -> NoReturn:
    """End the process without the library's destructors, which other threads may need."""
    sys.stderr.flush()
    os._exit(status)


def main(arguments: list[str]) -> NoReturn:
    """Serve the library on the command line, through the given descriptors."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent reports a crash, which is expected here. A core file would only fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    requests, control = (socket.socket(fileno=int(text)) for text in arguments[:2])
    for sock in (requests, control):
        sock.set_inheritable(False)
    Worker(requests, control).run(Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
