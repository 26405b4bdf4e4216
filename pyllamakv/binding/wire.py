"""The messages between a program and its worker: a JSON header and raw buffers, no pickle.

A message consists of a prefix (magic, sequence number, length of the header, length of the body),
the header as JSON, and the body: arrays and bytes, each aligned to 8 bytes so that it can be used
in place. A JSON object in the header always has the form ``{"$": kind, ...}``. Arguments and
results are numbers, text, None, lists, arrays, bytes, and the dataclasses and enumerations of
`protocol`.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pyllamakv import errors
from pyllamakv.binding import protocol
from pyllamakv.errors import KvError, NativeError

if TYPE_CHECKING:
    import socket

_PREFIX: Final = struct.Struct("<IIQQ")
_MAGIC: Final = 0x314B4C50
#: Maximum length of a header.
_LIMIT: Final = 1 << 26
#: Bodies up to this size are sent together with the header.
_SMALL: Final = 1 << 14
#: Errors from unpacking data that `pack` did not create.
_NONSENSE: Final = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip

_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_KINDS: Final[dict[str, Any]] = {
    name: value
    for name, value in vars(protocol).items()
    if isinstance(value, type)
    and value.__module__ == protocol.__name__
    and (dataclasses.is_dataclass(value) or issubclass(value, IntEnum | IntFlag))
}
#: Supported dtypes, by name.
_DTYPES: Final = {np.dtype(name).str: np.dtype(name) for name in ("i1", "u1", "i4", "u8", "f4")}
#: Errors of Python itself that keep their class; any other becomes a NativeError.
_BUILTIN: Final = frozenset({"TypeError", "ValueError", "OverflowError", "MemoryError"})


class WireError(NativeError):
    """Report bytes that are not a message: one side is damaged or of another version."""


def pack(value: Any, body: list[Any]) -> Any:
    """Return a value as JSON can write it; arrays and bytes are added to ``body``.

    Raises TypeError for a value of another type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return [pack(item, body) for item in value]
    if kind is np.ndarray:
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of {value.dtype} cannot be sent to a worker")
        body.append(np.ascontiguousarray(value))
        return {"$": "array", "of": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, bytes | bytearray | memoryview):
        body.append(value)
        return {"$": "bytes", "n": len(value)}
    if kind is dict:
        return {"$": "dict", "items": [[k, pack(v, body)] for k, v in value.items()]}
    if kind.__name__ in _KINDS:
        if dataclasses.is_dataclass(value):
            names = [item.name for item in dataclasses.fields(value)]
            packed = [pack(getattr(value, name), body) for name in names]
            return {"$": kind.__name__, "v": packed}
        return {"$": kind.__name__, "v": [int(value)]}
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, BaseException):
        return {"$": "error", **pack_error(value, body)}
    raise TypeError(f"a {kind.__name__} cannot be sent to a worker")


class _Body:
    """Hand out the buffers of a body in the order in which they were added."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> memoryview:
        end = self._at + length
        if length < 0 or end > len(self._data):
            raise WireError("a message is shorter than its header states")
        found = self._data[self._at : end]
        self._at = end + (-end & 7)
        return found


def unpack(value: Any, body: _Body) -> Any:
    """Return the value that `pack` was given; arrays are views of the body."""
    if type(value) is list:
        return [unpack(item, body) for item in value]
    if type(value) is not dict:
        return value
    kind = value["$"]
    if kind == "array":
        dtype = _DTYPES[value["of"]]
        shape = value["shape"]
        count = 1
        for length in shape:
            count *= length
        return np.frombuffer(body.take(count * dtype.itemsize), dtype).reshape(shape)
    if kind == "bytes":
        return bytes(body.take(value["n"]))
    if kind == "dict":
        return {k: unpack(v, body) for k, v in value["items"]}
    if kind == "error":
        return unpack_error(value, body)
    return _KINDS[kind](*[unpack(item, body) for item in value["v"]])


def pack_error(error: BaseException, body: list[Any]) -> dict[str, Any]:
    """Return an exception as class, message and fields, with the repr of unsupported values."""
    fields = {}
    for name, value in vars(error).items():
        if not name.startswith("__"):
            mark = len(body)
            try:
                fields[name] = [isinstance(value, tuple), pack(value, body)]
            except TypeError:
                del body[mark:]
                fields[name] = [False, repr(value)]
    return {
        "class": type(error).__name__,
        "message": error.args[0] if error.args and type(error.args[0]) is str else str(error),
        "fields": fields,
    }


def unpack_error(packed: dict[str, Any], body: _Body) -> Exception:
    """Return the exception for a result of `pack_error`, of its own class if possible."""
    name, message = packed["class"], packed["message"]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, KvError):
        error = kind.__new__(kind)
        error.args = (message,)
        for field, (is_tuple, value) in packed["fields"].items():
            found = unpack(value, body)
            setattr(error, field, tuple(found) if is_tuple else found)
        return error
    if name in _BUILTIN:
        made: Exception = getattr(builtins, name)(message)
        return made
    return NativeError(f"the worker failed: {name}: {message}")


def of_channel(error: BaseException) -> bool:
    """Return whether a channel raised an error, and not a signal handler that ran meanwhile."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__


class Channel:
    """Send and receive messages over a socket; one thread at a time in each direction."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        #: What was received after the last header.
        self._parts: list[bytes] = []
        #: The number, header and body of the message being received, with the sizes of the parts of
        #: the body. A signal handler may raise meanwhile: the next call continues.
        self._message: tuple[int, Any, memoryview, list[int]] | None = None
        #: The last answer: its number, whether it is an error, the result.
        self.answered: tuple[int, bool, Any] = (-1, False, None)
        #: The last message: its number, its size, and the sizes of the parts that were sent.
        self._last: tuple[int, int, list[int]] = (-1, 0, [])

    @property
    def sending(self) -> bool:
        """Return whether a message was sent in part."""
        _, size, sent = self._last
        return 0 < sum(sent) < size

    def has_sent(self, number: int) -> bool:
        """Return whether the message with this number is the last, and was sent whole."""
        last, size, sent = self._last
        return last == number and sum(sent) == size

    def send(self, number: int, header: Any, body: list[Any]) -> None:
        """Send one message."""
        text = json.dumps(header, separators=(",", ":")).encode()
        if not body:
            self._send(number, [_PREFIX.pack(_MAGIC, number, len(text), 0) + text])
            return
        parts: list[Any] = []
        length = 0
        for item in body:
            view: Any = memoryview(item)
            view = view.cast("B") if view.nbytes else b""
            pad = -len(view) & 7
            parts += (view, bytes(pad)) if pad else (view,)
            length += len(view) + pad
        prefix = _PREFIX.pack(_MAGIC, number, len(text), length)
        if length <= _SMALL:
            self._send(number, [b"".join((prefix, text, *parts))])
            return
        self._send(number, [prefix + text, *parts])

    def _send(self, number: int, parts: list[Any]) -> None:
        sent: list[int] = []
        self._last = number, sum(map(len, parts)), sent
        for part in parts:
            left = memoryview(part)
            while left:
                # One call of C sends and counts: a signal handler cannot raise between both.
                sent.extend(map(self.sock.send, (left,)))
                left = left[sent[-1] :]

    def receive(self) -> tuple[int, Any, _Body]:
        """Return the number, the header and the body of the next message.

        Raises EOFError if the other side has ended, TimeoutError after the timeout of the socket,
        and WireError for an invalid message.
        """
        number, header, body = self._receive()
        self._message = None
        return number, header, _Body(body)

    def _receive(self) -> tuple[int, Any, memoryview]:
        """Return the next message, which stays the next one until `_message` is None."""
        if self._message is None:
            self._begin()
        assert self._message is not None
        number, header, body, sizes = self._message
        while (have := sum(sizes)) < len(body):
            sizes.extend(map(self.sock.recv_into, (body[have:],)))
            if not sizes[-1]:
                raise EOFError
        return number, header, body

    def _begin(self) -> None:
        """Receive the header of the next message."""
        data = self._fill(_PREFIX.size)
        magic, number, n_header, n_body = _PREFIX.unpack_from(data)
        if magic != _MAGIC or n_header > _LIMIT:
            raise WireError("the worker and this program use different protocol versions")
        start = _PREFIX.size + n_header
        data = self._fill(start)
        end = start + n_body
        try:
            header = json.loads(data[_PREFIX.size : start])
            whole = len(data) >= end
            body = memoryview(bytearray(data[start:end]) if whole else bytearray(n_body))
        except _NONSENSE as error:
            raise WireError(f"cannot read a message: {error}") from error
        if not whole:
            body[: len(data) - start] = data[start:]
        message = number, header, body, [min(len(data), end) - start]
        # Both at once, because a signal handler may raise between statements.
        self._parts, self._message = [data[end:]], message

    def answer(self) -> tuple[int, bool, Any, list[tuple[int, str]]]:
        """Return the number of the next reply, whether it is an error, which or what, and the log.

        Raises as `receive` does.
        """
        number, header, view = self._receive()
        body = _Body(view)
        try:
            failed, value, records = header if len(header) > 2 else (*header, [])
            result = unpack_error(value, body) if failed else unpack(value, body)
            failed = bool(failed)
            log = [(int(level), str(text)) for level, text in records]
        except _NONSENSE as error:
            raise WireError(f"cannot read an answer: {error}") from error
        self.answered, self._message = (number, failed, result), None
        return number, failed, result, log

    def _fill(self, length: int) -> bytes:
        """Return what was received, at least this many bytes."""
        while len(data := b"".join(self._parts)) < length:
            # One call of C receives and keeps: a signal handler cannot raise between both.
            self._parts.extend(map(self.sock.recv, (65536,)))
            if not self._parts[-1]:
                raise EOFError
        return data
