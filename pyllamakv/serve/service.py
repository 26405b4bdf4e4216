"""Open a model and its cache, and serve them over HTTP until a signal.

The address is bound before the model is loaded, so that a mistake is reported at once. Requests are
accepted when the model is ready.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import pyllamakv
from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import (
    AddressInUse,
    BudgetTooSmall,
    NotEnoughMemory,
    PrefixStoreBusy,
    UsageError,
)
from pyllamakv.serve.app import Api
from pyllamakv.serve.engine import Engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path
    from types import FrameType

LOG = logging.getLogger("pyllamakv.serve")

#: Cells of a context if neither the user nor the model names a number.
_CELLS: Final = 4096
#: Maximum bytes of the line and headers of a request, and seconds in which they must arrive.
_HEAD_BYTES: Final = 64 << 10
_HEAD_SECONDS: Final = 30.0
#: Seconds in which a client must read some of the data that waits for it.
_READ_SECONDS: Final = 60.0
#: Threads that tokenize and create samplers.
_WORKERS: Final = 4
#: Seconds that connections have after the grace period, to send the error of a cancelled request.
_LAST_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `pyllamakv serve` serves, and where.

    ``n_ctx`` cells (None: the context of the model's training) are shared by ``parallel`` sequences
    and the cached prefixes. ``queue`` more generations wait. ``budget`` limits the bytes of the
    cache, and of the store. With ``keys``, requests of different keys share prefixes only if
    ``shares_prefixes``. New tokens are flushed to the store ``flush_every`` seconds after the last
    flush, or when they have ``flush_bytes`` bytes. ``grace`` is the number of seconds that requests
    have after SIGTERM.
    """

    model: Path
    name: str
    release: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    n_ctx: int | None = None
    parallel: int = 4
    queue: int = 256
    n_threads: int | None = None
    store: Path | None = None
    budget: int | None = None
    flush_every: float = 10.0
    flush_bytes: int = 64 << 20
    grace: float = 30.0
    keys: tuple[str, ...] = ()
    shares_prefixes: bool = False
    template: str | None = None


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys of a file: one per line; empty lines and those with # are skipped.

    Raises UsageError for a file that cannot be read or has no key, and for a key that no header can
    contain: all requests with it would be refused.
    """
    try:
        # Editors of Windows write a mark of the byte order, which is no part of the first key.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the API keys in {path}: {error}") from error
    keys = []
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if not line or line.startswith("#"):
            continue
        if not (line.isascii() and line.isprintable()):
            msg = f"line {number} of {path} is no API key: use printable ASCII characters only"
            raise UsageError(msg)
        keys.append(line)
    if not keys:
        raise UsageError(f"{path} has no API key: write one per line")
    return tuple(keys)


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again after the store was flushed.

    ``ready`` is called with the URL when requests are accepted. Raises AddressInUse, the errors of
    `kv.open`, of loading the model and of opening the store, and the error after which no request
    can succeed.
    """
    _raise_file_limit()
    with bound(options.host, options.port) as listener, opened(options) as engine:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        api = Api(
            engine,
            options.name,
            keys=options.keys,
            shares_prefixes=options.shares_prefixes,
            lifespan=lambda _: _running(),
        )
        config = uvicorn.Config(
            api,
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            http=LimitedConnection,
            ws="none",
            timeout_graceful_shutdown=int(options.grace) + _LAST_SECONDS,
        )
        server = Server(config)

        @asynccontextmanager
        async def _running() -> AsyncIterator[None]:
            tasks = [asyncio.create_task(_watch(server, engine, options.grace))]
            if options.store is not None:
                flushing = engine.keep_flushed(options.flush_every, options.flush_bytes)
                tasks.append(asyncio.create_task(flushing))
            ready(url)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await engine.aclose()

        listener.listen(2048)
        # uvicorn raises the signal that ended it again, and the command line exits with its status.
        server.run(sockets=[listener])
        if engine.failure is not None:
            raise engine.failure


class Server(uvicorn.Server):  # type: ignore[misc]
    """A server whose grace period also ends at a second signal.

    At a second Ctrl-C, uvicorn drops the connections and logs tracebacks; a second SIGTERM has no
    effect there. The third Ctrl-C is uvicorn's second one.
    """

    #: Whether the grace period has ended early.
    hurries = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server, or end its grace period, as a signal handler."""
        if self.should_exit and not self.hurries:
            self.hurries = True
        else:
            super().handle_exit(sig, frame)


class LimitedConnection(HttpToolsProtocol):  # type: ignore[misc]
    """The HTTP of a connection; headers are limited in size and time, and trailers in size.

    uvicorn limits neither with httptools, and reads headers before `Api` can check a key. A client
    that stops reading is disconnected, which uvicorn does not do either.
    """

    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    #: Number of bytes since the headers began or ended, or a part of the body.
    _n_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the time of the first request, also if nothing arrives."""
        super().connection_made(transport)
        # Writing pauses until all is sent, so that the rest of a short answer has a limit too.
        transport.set_write_buffer_limits(high=0)
        self._timer = self.loop.call_later(_HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop()
        self._stop_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the time in which the client must read."""
        self._stop_reading()
        super().resume_writing()

    def _expect_reading(self, unsent: int) -> None:
        self._stop_reading()
        self._reading = self.loop.call_later(_READ_SECONDS, self._check_reading, unsent)

    def _check_reading(self, before: int) -> None:
        """Close the connection, unless fewer than ``before`` bytes wait for the client."""
        unsent = self.transport.get_write_buffer_size()
        if unsent >= before:
            self.transport.abort()
        else:
            self._expect_reading(unsent)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def data_received(self, data: bytes) -> None:
        """Parse data; close the connection if headers or trailers have become too large."""
        self._n_bytes += len(data)
        super().data_received(data)
        if self._n_bytes > _HEAD_BYTES:
            self.send_400_response(f"The headers exceed {_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Start the time of a request."""
        super().on_message_begin()
        self._n_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def on_headers_complete(self) -> None:
        """Stop the time, and begin with the request."""
        self._n_bytes = 0
        self._stop()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on; `Api` limits all of it."""
        self._n_bytes = 0
        super().on_body(body)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _watch(server: Server, engine: Engine, grace: float) -> None:
    """Stop the server after a failure; cancel what still runs after the grace period."""
    loop = asyncio.get_running_loop()
    while not server.should_exit:
        if engine.failure is not None:
            server.handle_exit(0, None)
        await asyncio.sleep(0.1)
    engine.stop()
    start = loop.time()
    while not server.hurries and (left := start + grace - loop.time()) > 0:
        await asyncio.sleep(min(left, 0.1))
    passed = loop.time() - start
    LOG.warning("cancelled %d generations after %.1f seconds", engine.pending, passed)
    engine.cancel_all()


@contextmanager
def opened(options: ServeOptions) -> Iterator[Engine]:
    """Open the library, the model, a context and its prefix cache; close them in order.

    Closing flushes the store.
    """
    with ExitStack() as stack:
        library = stack.enter_context(pyllamakv.open(options.release))
        model = stack.enter_context(library.load_model(options.model))
        if not model.info.has_vocab:
            raise UsageError(f"{options.model} has no vocabulary, so it cannot serve text")
        try:
            context = model.context(
                n_ctx=options.n_ctx or model.info.n_ctx_train or _CELLS,
                n_batch=2048,
                n_ubatch=512,
                n_seq_max=options.parallel,
                n_threads=options.n_threads,
                defrag_policy="threshold",
                flash_attn=None if Capability.FLASH_AUTO in library.about.capabilities else False,
            )
        except NotEnoughMemory as error:
            error.hint = "start the server with fewer cells: --ctx N"
            raise
        stack.enter_context(context)
        # After the cache was flushed: a long prompt that is tokenized must not delay it.
        workers = stack.enter_context(ThreadPoolExecutor(_WORKERS, "pyllamakv-serve"))
        try:
            # What is evicted is in memory first, because a store is slower.
            cache = PrefixCache(
                context, budget=options.budget, store=options.store, paging="memory"
            )
        except BudgetTooSmall as error:
            error.hint = "start the server with a larger --budget"
            raise
        except PrefixStoreBusy as error:
            msg = f"another process writes to {options.store}: end it, or select another --store"
            raise PrefixStoreBusy(msg, error.path) from error
        stack.enter_context(cache)
        capacity = options.parallel + options.queue
        yield Engine(cache, workers, capacity=capacity, template=options.template)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a TCP socket to an address; raise AddressInUse if that is impossible."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise AddressInUse(f"cannot listen on {host}:{port}: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
            msg = f"cannot listen on {host}:{port}: {error.strerror}; select another {option}"
            raise AddressInUse(msg) from error
        yield listener


def _raise_file_limit() -> None:
    """Allow as many connections as the system does; the usual limit of 1,024 files is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
