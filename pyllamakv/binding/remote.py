"""Implement `protocol.Native` over a worker process, which may crash or hang without harm.

Each operation becomes one message, and its answer the result. `forwarding` generates the methods
from the Protocol. Each calls one of these methods: `_ask`, `_ask_array` or `_release`. Only
`cancel`, `close`, `logs` and `run` are written here.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyllamakv.binding.forwarding import forwards
from pyllamakv.binding.logs import TAIL, forward
from pyllamakv.binding.process import CANCEL, GRACE, START, Process, describe
from pyllamakv.binding.protocol import Native
from pyllamakv.binding.signal_check import CancelRequest, keep_run
from pyllamakv.binding.wire import Channel, WireError, of_channel, pack
from pyllamakv.errors import Busy, Closed, DeviceLost, KvError, WorkerDied, WorkerTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle, SamplerHandle

    # Declares the generated methods. mypy takes the methods of a Protocol for abstract, so making a
    # `Remote` needs an ignore.
    _Declared = Native
else:
    _Declared = object

#: The last output of a backend whose device or server was lost.
_LOST: Final = ("CUDA error", "RPC server", "ggml-rpc", "vk::DeviceLostError", "ErrorDeviceLost")
#: Operations written below: `cancel` must not wait, `close` ends the worker, `logs` and `run` make
#: tuples.
_BY_HAND: Final = ("cancel", "close", "logs", "run")
#: Operations that free a handle; a finaliser may call them during another call.
_FREEING: Final = ("model_free", "context_free", "sampler_free", "adapter_free")
#: Operations that create an object, and those that free it.
_CREATING: Final = {
    "model_load": "model_free",
    "context_new": "context_free",
    "sampler_new": "sampler_free",
    "adapter_load": "adapter_free",
}
#: Operations that decode, and the place of the context in their arguments.
_DECODING: Final = {"decode": 0, "run": 1}
#: Operations that return an array, which is read-only as that of `Local` is.
_ARRAYS: Final = ("embeddings", "logits", "logits_all")


@forwards(Native, via="_ask", by_hand=(*_BY_HAND, *_FREEING, *_ARRAYS))
@forwards(Native, via="_release", only=_FREEING)
@forwards(Native, via="_ask_array", only=_ARRAYS)
class Remote(_Declared):
    """Call a library in a worker process.

    One call runs at a time; other threads wait. After a worker has died, or exceeded ``timeout``
    seconds, every later call raises the same error.
    """

    def __init__(
        self, path: Path, *, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> None:
        """Start a worker for the library at ``path``.

        Raises LoadError as `Local` does, WorkerDied when it ends while it loads.
        """
        self._lock = threading.RLock()
        self._working = False
        #: The number and operation of the last request.
        self._number, self._operation = 0, ""
        self._later: deque[tuple[str, int]] = deque()
        #: Numbers of interrupted requests that create an object, with what frees it.
        self._abandoned: dict[int, str] = {}
        self._lines: deque[str] = deque(maxlen=TAIL)
        self._gone: tuple[type[WorkerDied], str, int, int | None, tuple[str, ...]] | None = None
        self._closed = False
        self._timeout = timeout
        self.environment: Mapping[str, str] = dict(env or {})
        self._process = Process(path, env)
        self._finalizer = weakref.finalize(self, self._process.end)
        self._channel = Channel(self._process.requests)
        self._channel.sock.settimeout(max(START, timeout or 0.0))
        try:
            self.about = self._answer("load the library", 0)
        except BaseException:
            self._closed = True
            self._finalizer()
            raise
        self._channel.sock.settimeout(timeout)

    @property
    def pid(self) -> int:
        """Return the worker's process id."""
        return self._process.pid

    @property
    def timeout(self) -> float | None:
        """Seconds of silence after which a call raises WorkerTimeout; None waits for ever."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        if not self._closed:
            self._channel.sock.settimeout(seconds)

    def rpc_serve(self, endpoint: str, device: str | None, memory: int) -> None:
        """Serve a device at host:port until `close`; raises the error of a failed start."""
        self._ask("rpc_serve", endpoint, device, memory)

    def close(self) -> None:
        """End the worker and reap it, also during a call. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        free = self._lock.acquire(blocking=False)
        if not free and self._process.owned:
            # The thread that waits for an answer gets an error, and releases the lock.
            self._process.kill()
            free = self._lock.acquire(timeout=GRACE)
        try:
            if self._gone is None and self._process.owned and not self._working:
                self._channel.sock.settimeout(GRACE)
                self._exchange("close", (), [])
        except (WorkerDied, OSError):
            pass  # then it is gone already
        finally:
            if free:
                self._lock.release()
            self._finalizer()

    # operations written by hand
    def cancel(self, context: ContextHandle) -> None:
        """End the decode that runs; callable from any thread, and never waits for a call."""
        if self._closed or not self._process.owned:
            raise Closed("this worker was closed")
        try:
            self._process.control.send(CANCEL.pack(context, self._number))
        except OSError:
            return  # a worker that is gone computes nothing

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log."""
        return [(level, text) for level, text in self._ask("logs")]

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode a token of each sequence and choose the next ones, ``steps`` times in one call.

        The exception of a signal handler has the completed steps (`signal_check.take_run`).
        """
        before = self._number
        try:
            code, rows = self._ask("run", sampler, context, token, pos, seq_id, steps, stop)
            return code, rows
        except BaseException as error:
            # The class does not show whether a signal handler raised it.
            number = self._number
            sent = number > before and self._operation == "run" and self._channel.has_sent(number)
            answer = self._channel.answered[2] if sent else error
            if error is not answer and self._gone is None and not self._closed:
                self.cancel(context)
                with suppress(KvError):
                    code, rows = self._late_answer("run", self._number)
                    if rows:
                        keep_run(error, code, rows)
            raise

    # calls
    def _late_answer(self, operation: str, number: int) -> Any:
        """Return the answer to a request whose wait was interrupted."""
        with self._lock:
            self._check()
            self._working = True
            try:
                return self._answer(operation, number)
            finally:
                self._working = False

    def _ask(self, operation: str, *arguments: Any) -> Any:
        body: list[Any] = []
        packed = [pack(item, body) for item in arguments]
        with self._lock:
            self._check()
            if self._abandoned:
                self._exchange("an interrupted call", None, [])
            while self._later:
                late, handle = self._later.popleft()
                self._exchange(late, [handle], [])
            return self._exchange(operation, packed, body)

    def _ask_array(self, operation: str, *arguments: Any) -> NDArray[np.float32]:
        """Return the answer as a read-only array."""
        found: NDArray[np.float32] = self._ask(operation, *arguments)
        found.flags.writeable = False
        return found

    def _release(self, operation: str, handle: int) -> None:
        """Free an object: now, or before the next call if one is running.

        A finaliser may run during a call, in the thread of that call.
        """
        self._later.append((operation, handle))
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._check()
            while self._later:
                late, freed = self._later.popleft()
                self._exchange(late, [freed], [])
        except (Busy, Closed, WorkerDied):
            return  # a dead worker needs no freeing; a busy one frees later
        finally:
            self._lock.release()

    def _check(self) -> None:
        if self._working:
            raise Busy("this worker is in use by the same thread: a call inside of a call")
        if self._closed or not self._process.owned:
            raise Closed("this worker was closed, or belongs to the process that forked this one")
        if self._gone is not None:
            self._raise()

    def _exchange(self, operation: str, packed: Any, body: list[Any]) -> Any:
        """Send a request and return its answer; without ``packed``, only await abandoned ones."""
        self._working = True
        number = self._number + 1
        try:
            if packed is None:
                while self._abandoned:
                    if not self._free_abandoned():
                        self._receive(operation)
                return None
            self._number, self._operation = number, operation
            self._channel.send(number, [operation, *packed], body)
            if operation not in _DECODING:
                return self._answer(operation, number)
            context = packed[_DECODING[operation]]
            with CancelRequest.ends(lambda: self.cancel(context)):
                return self._answer(operation, number)
        except BaseException as error:
            if isinstance(error, OSError) and self._gone is None and of_channel(error):
                self._end(operation, error)
            # An interrupted wait leaves an answer that the next call skips. A request that was sent
            # in part leaves a stream that cannot be parsed.
            if self._gone is None and self._channel.sending:
                self._died(operation, self._process.kill())
            sent = self._gone is None and self._channel.has_sent(number)
            if sent and operation in _CREATING:
                self._abandoned[number] = _CREATING[operation]
                self._free_abandoned()
            raise
        finally:
            self._working = False

    def _answer(self, operation: str, number: int) -> Any:
        while self._channel.answered[0] != number:
            self._receive(operation)
        _, failed, result = self._channel.answered
        if failed:
            raise result
        return result

    def _free_abandoned(self) -> bool:
        """Free the object of the last answer later if no caller has it; return whether."""
        number, failed, result = self._channel.answered
        freeing = self._abandoned.pop(number, None)
        if freeing is not None and not failed:
            self._later.append((freeing, result))
        return freeing is not None

    def _receive(self, operation: str) -> None:
        """Receive one answer."""
        try:
            records = self._channel.answer()[3]
            self._free_abandoned()
            self._lines.extend(text for level, text in records if level > 1)
            forward(records)
        except (EOFError, OSError) as error:
            if not of_channel(error):
                raise
            self._end(operation, error)
        except WireError as error:
            self._process.kill()
            self._died(f"{operation} ({error})", self._process.wait())

    # ends
    def _end(self, operation: str, error: Exception) -> NoReturn:
        """Raise for an error of the channel."""
        if isinstance(error, TimeoutError):
            self._silent(operation)
        self._died(operation, self._process.wait())

    def _died(self, operation: str, status: int) -> NoReturn:
        tail = self._process.tail()
        output = f": {tail[-1]}" if tail else ""
        lost = any(mark in line for mark in _LOST for line in tail)
        hint = (
            "; the device or server behind it is gone, or of another release: when it is back, "
            "open the library again"
        )
        self._gone = (
            DeviceLost if lost else WorkerDied,
            f"the worker {describe(status)} during {operation}{output}{hint if lost else ''}",
            max(0, -status),
            status,
            (*self._lines, *tail),
        )
        self._raise()

    def _silent(self, operation: str) -> NoReturn:
        seconds = self._channel.sock.gettimeout()
        status = self._process.kill()
        self._gone = (
            WorkerTimeout,
            f"the worker did not answer {operation} within {seconds} s and was ended; give it "
            "more time with timeout=",
            max(0, -status),
            status,
            (*self._lines, *self._process.tail()),
        )
        self._raise()

    def _raise(self) -> NoReturn:
        assert self._gone is not None
        kind, message, signal, exitcode, log = self._gone
        raise kind(message, signal=signal, exitcode=exitcode, log=log)
