"""Send the requests of a schedule to a server, from as many clients as it has slots.

A server that ends, or no longer answers, is started again, as a service manager does; the requests
that it held are lost.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import PromptTooLong, RequestFailed, ServerDied
from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_lab import ENDING
from pyllamakv.server.server_process import ServerProcess
from qa.load.load_result import GAPS, LoadResult, RequestTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from qa.load.request_schedule import LoadRequest


class RestartedServer(ClosedOnExit):
    """A server that is started again when it ends or hangs. Thread-safe."""

    def __init__(self, start: Callable[[], AbstractContextManager[ServerProcess]]) -> None:
        """Use servers that ``start`` makes, one after the other."""
        self._start = start
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._server: ServerProcess
        self._retries = 0
        self._begin = time.perf_counter()
        #: When servers ended, in seconds since the first one was ready, and why.
        self.deaths: list[tuple[float, str]] = []

    @property
    def url(self) -> str:
        """Return the address of the present server."""
        with self._lock:
            return self._server.url

    @property
    def retries(self) -> int:
        """Return how many batches found no cells, over all servers."""
        return self._retries + self._server.retries

    def replace(self, url: str, failure: Exception) -> None:
        """Start another server if the one at ``url`` has ended, or did not answer in time.

        ``failure`` is what its client saw.
        """
        with self._lock:
            server = self._server
        hung = isinstance(failure, TimeoutError)
        # Without the lock: the other clients go on if only a connection was closed.
        if server.url != url or not (hung or server.ended(ENDING)):
            return
        with self._lock:
            if self._server is server:
                self._note(failure if hung else server.death())
                self._end()
                self._retries += server.retries
                self._server = self._stack.enter_context(self._start())

    def close(self) -> None:
        """End the server; note if it had ended after its last answer."""
        if self._server.ended(0.0):
            self._note(self._server.death())
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(ServerDied):  # its end was noted before
            self._stack.close()

    def _note(self, why: Exception) -> None:
        first = str(why).split("\n", 1)[0]
        self.deaths.append((time.perf_counter() - self._begin, first))

    def __enter__(self) -> Self:
        self._server = self._stack.enter_context(self._start())
        self._begin = time.perf_counter()
        return self


def send(
    start: Callable[[], AbstractContextManager[ServerProcess]],
    requests: Sequence[LoadRequest],
    clients: int,
    tick: Callable[[int], None],
    *,
    openai: bool = False,
) -> LoadResult:
    """Send each request when it arrives and a client is free; return the result.

    With ``openai``, requests are those of OpenAI's API, else llama-server's own. ``tick`` is called
    with the number of requests that have ended.
    """
    timings: list[RequestTiming | None] = [None] * len(requests)
    lock, stopped = threading.Lock(), threading.Event()
    waiting = iter(enumerate(requests))
    before = _cpu_seconds()

    def serve() -> None:
        with _Connection(server, openai=openai) as connection:
            while True:
                with lock:
                    index, request = next(waiting, (-1, None))
                if request is None:
                    return
                now = time.perf_counter() - begin
                at = now if request.at is None else request.at
                if stopped.wait(max(0.0, at - now)):
                    return
                timings[index] = connection.ask(request, begin, at)
                tick(sum(each is not None for each in timings))

    with RestartedServer(start) as server:
        begin = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            try:
                for each in as_completed([pool.submit(serve) for _ in range(clients)]):
                    each.result()
            except BaseException:
                stopped.set()
                raise
    done = tuple(each for each in timings if each is not None)
    # The whole log was read when the server was closed.
    return LoadResult(done, _cpu_seconds() - before, server.retries, tuple(server.deaths))


class _Connection(ClosedOnExit):
    """The connection of one client, which follows the server to its next address."""

    def __init__(self, server: RestartedServer, *, openai: bool = False) -> None:
        self._openai = openai
        self._server = server
        self._url = server.url
        self._client = ServerClient(self._url)

    def ask(self, request: LoadRequest, begin: float, at: float) -> RequestTiming:
        """Return the times of a request that arrives ``at``, in seconds after ``begin``."""
        if self._server.url != self._url:
            self._client.close()
            self._url = self._server.url
            self._client = ServerClient(self._url)
        tokens, error = 0, ""
        times: list[float] = []
        broken: Exception | None = None
        try:
            for event in self._stream(request):
                times.append(time.perf_counter() - begin)
                tokens = int(event.get("tokens_predicted", tokens))
                tokens = int((event.get("usage") or {}).get("completion_tokens", tokens))
            if tokens != request.n_predict:
                error = f"{tokens} of {request.n_predict} tokens"
        except (ConnectionError, TimeoutError) as failed:
            broken, error = failed, f"{type(failed).__name__}: {failed}"
        except (PromptTooLong, RequestFailed) as refused:
            error = f"{type(refused).__name__}: {refused}"
        ended = time.perf_counter() - begin
        if broken:
            self._server.replace(self._url, broken)
        gaps = sorted(pairwise(times), key=lambda gap: gap[0] - gap[1])[:GAPS]
        return RequestTiming(at, times[0] if times else ended, ended, tokens, error, tuple(gaps))

    def _stream(self, request: LoadRequest) -> Generator[dict[str, Any], None, None]:
        if self._openai:
            return self._client.stream_openai(request.prompt, request.n_predict)
        return self._client.stream(request.prompt, request.n_predict, n_probs=0)

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def _cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_serve(
    variant: Path, model: Path, cells: int, slots: int, threads: int, *options: object
) -> ServerProcess:
    """Start `pyllamakv serve` of this environment, with the libraries of a variant's folder."""
    sizes = {"--ctx": cells, "--parallel": slots, "--threads": threads}
    words: list[object] = ["serve", model, "--release", variant, "--host", "127.0.0.1", "--port", 0]
    words += [word for pair in sizes.items() for word in pair]
    program = Path(sys.executable).with_name("pyllamakv")
    return ServerProcess(program, [str(word) for word in (*words, *options)])
