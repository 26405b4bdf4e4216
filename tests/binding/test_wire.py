"""Test that messages to a worker arrive unchanged."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllamakv import errors
from pyllamakv.binding.protocol import (
    Capability,
    CellsInfo,
    ContextInfo,
    ContextParams,
    Counters,
    DecodeStatus,
    DefragMover,
    DefragPlan,
    LibraryInfo,
    MemoryType,
    ModelParams,
    RawCells,
)
from pyllamakv.binding.wire import (
    Channel,
    WireError,
    pack,
    pack_error,
    unpack,
    unpack_error,
)


def trip(value: Any) -> Any:
    """Send a value through a socket and return what arrives."""
    one, two = socket.socketpair()
    with one, two:
        one.settimeout(120)
        two.settimeout(120)
        body: list[Any] = []
        packed = pack(value, body)
        sender = threading.Thread(target=Channel(one).send, args=(7, [packed], body))
        sender.start()
        number, header, received = Channel(two).receive()
        sender.join(120)
        assert number == 7
        return unpack(header[0], received)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(PLAIN)
@settings(max_examples=60, deadline=None)
def test_plain_values_are_transferred_unchanged(value: object) -> None:
    """Numbers, text, bytes, lists and dictionaries are unchanged."""
    assert trip(value) == value


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64", "float32"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0), (3, 5), (70000,)])
def test_arrays_keep_dtype_shape_and_contents(dtype: str, shape: tuple[int, ...]) -> None:
    """Arrays, small and large, keep dtype, shape and contents, and are writable."""
    value = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    found = trip(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert np.array_equal(found, value)
    assert found.flags.writeable
    assert found.ctypes.data % found.dtype.itemsize == 0


def test_strided_arrays_arrive_contiguous() -> None:
    """A strided array arrives contiguous."""
    value = np.arange(20, dtype=np.int32)[::3]
    assert trip(value).tolist() == value.tolist()


def test_several_buffers_keep_their_order() -> None:
    """Buffers of odd lengths do not change the offsets of others."""
    value = [b"abc", np.arange(3, dtype=np.int8), b"", np.arange(4, dtype=np.uint64), b"x"]
    found = trip(value)
    assert found[0] == b"abc"
    assert found[1].tolist() == [0, 1, 2]
    assert found[2] == b""
    assert found[3].tolist() == [0, 1, 2, 3]
    assert found[4] == b"x"


INFO = CellsInfo(0, True, 4, 2, -1, False, 2, 1, 8, True, True, 2**40, 5)


@pytest.mark.parametrize(
    "value",
    [
        ContextParams(n_ctx=77, flash_attn=None, defrag_thold=0.1),
        ModelParams(rpc_servers="a:1,b:2"),
        LibraryInfo(1, "v", Capability.CELLS | Capability.DEFRAG, {"load": "x", "cells": None}),
        ContextInfo(
            1,
            2,
            3,
            4,
            MemoryType.SWA,
            2,
            True,
            None,
            False,
            True,
            None,
            True,
            7,
            4,
            0.5,
            DefragPlan.ORDERED,
            DefragMover.GATHER,
            3,
        ),
        Counters(1, 2, 3),
        DecodeStatus.NO_SLOT,
        INFO,
    ],
    ids=lambda value: type(value).__name__,
)
def test_protocol_dataclasses_keep_their_classes(value: object) -> None:
    """Dataclasses and enumerations of the protocol keep their classes."""
    found = trip(value)
    assert found == value
    assert type(found) is type(value)


def test_arrays_in_a_dataclass_are_transferred() -> None:
    """A snapshot's arrays are transferred in their dataclass."""
    value = RawCells(
        INFO, np.arange(4, dtype=np.int32), np.zeros(4, np.int32), np.ones((4, 2), np.uint64)
    )
    found = trip(value)
    assert found.info == INFO
    assert found.pos.tolist() == [0, 1, 2, 3]
    assert found.seqs.shape == (4, 2)


def test_unknown_classes_are_refused_by_the_sender() -> None:
    """There is no pickle: an unknown class is an error of the sender."""
    for value in (object(), {1, 2}, np.zeros(2, np.complex64)):
        with pytest.raises(TypeError, match="cannot be sent"):
            pack(value, [])


def cross(error: BaseException) -> Exception:
    """Return an error after its transfer."""
    found = trip(error)
    assert isinstance(found, Exception)
    return found


def test_errors_keep_class_message_and_fields() -> None:
    """A typed error is equal after its transfer, for any parameters of its constructor."""
    sent = errors.NoKVSlot(
        "no slot", cause="fragmented", n_tokens=64, stats=Counters(moves=3), log=["one", "two"]
    )
    found = cross(sent)
    assert type(found) is errors.NoKVSlot
    assert str(found) == "no slot"
    assert vars(found) == vars(sent)
    died = cross(errors.WorkerDied("gone", signal=6, exitcode=-6, log=["x"]))
    assert isinstance(died, errors.WorkerDied)
    assert (died.signal, died.exitcode, died.log) == (6, -6, ("x",))


ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KvError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_class_is_transferred(kind: type[errors.KvError]) -> None:
    """Each error class can be restored without its constructor."""
    sent = kind.__new__(kind)
    sent.args = ("the message",)
    sent.__dict__.update(number=3, nested=errors.UsageError("inner"), strange=object())
    found = cross(sent)
    assert type(found) is kind
    assert str(found) == "the message"
    assert found.number == 3
    assert isinstance(found.nested, errors.UsageError)
    assert found.strange.startswith("<object")


def test_unknown_errors_become_native_errors() -> None:
    """Built-in exceptions keep their class; the message of any other contains its class."""
    assert type(cross(OverflowError("big"))) is OverflowError
    found = cross(ZeroDivisionError("zero"))
    assert type(found) is errors.NativeError
    assert "ZeroDivisionError: zero" in str(found)


def test_unknown_error_class_becomes_native_error() -> None:
    """Names outside of the error classes are not resolved."""
    for name in ("Sequence", "annotations", "KeyboardInterrupt", "nothing"):
        packed = {"class": name, "message": "m", "fields": {}}
        assert type(unpack_error(packed, None)) is errors.NativeError  # type: ignore[arg-type]
    assert pack_error(errors.UsageError("m"), [])["class"] == "UsageError"


def test_stream_without_the_magic_is_refused() -> None:
    """Bytes without the magic number are refused, and an early end is an end of the stream."""
    one, two = socket.socketpair()
    with one, two:
        one.sendall(b"x" * 64)
        with pytest.raises(WireError, match="different protocol versions"):
            Channel(two).receive()
    one, two = socket.socketpair()
    with two:
        with one:
            Channel(one).send(1, ["abc"], [])
            one.sendall(b"PL")
        channel = Channel(two)
        assert channel.receive()[1] == ["abc"]
        with pytest.raises(EOFError):
            channel.receive()


def test_body_shorter_than_its_header_is_refused() -> None:
    """A header with a larger size than its body is refused."""
    one, two = socket.socketpair()
    with one, two:
        Channel(one).send(1, {"$": "bytes", "n": 100}, [b"abc"])
        _number, header, body = Channel(two).receive()
        with pytest.raises(WireError, match="shorter"):
            unpack(header, body)
