"""Signal handlers run during a decode in C."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.build import HANG, fake
from fakes.opened import LONG

from pyllamakv.binding import local, signal_check
from pyllamakv.binding.local import Local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyllamakv.binding.protocol import ContextHandle

pytest_plugins = ("fakes.opened",)

ENDLESS = ([HANG], [0], None, (0,), None)


@pytest.fixture
def native() -> Iterator[Local]:
    """Open the fake library in this process: the parent of a worker waits in Python."""
    opened = Local(fake())
    yield opened
    opened.close()


class Interrupt(BaseException):
    """What a handler of a program raises."""


@contextmanager
def handled(handler: Callable[..., object], delay: float = 0.03) -> Iterator[None]:
    """Send SIGUSR1, which is not the signal of a timeout, to this thread after some seconds."""
    before = signal.signal(signal.SIGUSR1, handler)
    target = threading.get_ident()
    timer = threading.Timer(delay, signal.pthread_kill, (target, signal.SIGUSR1))
    timer.start()
    try:
        yield
        timer.join(LONG)
    finally:
        assert signal.getsignal(signal.SIGUSR1) is handler
        signal.signal(signal.SIGUSR1, before)


def refuse(*_: object) -> None:
    """Raise what no code of ours knows."""
    raise Interrupt


def test_an_exception_of_a_handler_ends_the_decode(native: Local, context: ContextHandle) -> None:
    """An endless decode ends, and the next one does not."""
    with handled(refuse), pytest.raises(Interrupt):
        native.decode(context, *ENDLESS)
    assert native.seq_pos_max(context, 0) == -1
    assert native.decode(context, [1], [0], None, (0,), None) == 0
    assert not signal_check.raised


def test_a_second_exception_replaces_the_first(
    native: Local, context: ContextHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further signal as the call of C returns: no later decode raises what was pending."""

    def second() -> None:
        raise KeyboardInterrupt

    with handled(refuse), pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(local, "raise_pending", second)
        native.decode(context, *ENDLESS)
    monkeypatch.undo()
    assert native.decode(context, [1], [0], None, (0,), None) == 0


def test_two_exceptions_at_once_are_not_taken_for_a_cancel(
    native: Local, context: ContextHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two signals are pending at one check: the second is handled before the first is kept."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))
    signals = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(each, refuse) for each in signals]
    target = threading.get_ident()

    def send() -> None:  # both, before the check gets the GIL
        for each in signals:
            signal.pthread_kill(target, each)

    timer = threading.Timer(0.03, send)
    try:
        with pytest.raises(KeyboardInterrupt, match="two signals"):
            timer.start()
            native.decode(context, *ENDLESS)
    finally:
        timer.join(LONG)
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
    assert printed == [Interrupt, Interrupt]
    assert native.decode(context, [1], [0], None, (0,), None) == 0


def test_a_handler_may_cancel_or_return(native: Local, context: ContextHandle) -> None:
    """A handler that returns ends nothing: only its cancel does, here of the second signal."""
    calls: list[int] = []

    def handler(*_: object) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            native.cancel(context)

    again = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    with handled(handler):
        again.start()
        assert native.decode(context, *ENDLESS) == 2
    again.join(LONG)
    assert calls == [0, 1]


def test_other_threads_run_no_handlers(native: Local, context: ContextHandle) -> None:
    """The handler runs in the main thread while another one decodes, and cancels that decode."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(native.decode(context, *ENDLESS)))
    thread.start()
    with handled(lambda *_: native.cancel(context)):
        thread.join(LONG)
    assert found == [2]


def test_wakeup_descriptors_and_loops_are_left_alone(native: Local, context: ContextHandle) -> None:
    """The descriptor gets its byte, and asyncio its signal, as without a decode."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno())
        try:
            with handled(refuse), pytest.raises(Interrupt):
                native.decode(context, *ENDLESS)
        finally:
            assert signal.set_wakeup_fd(before) == theirs.fileno()
        assert ours.recv(8) == bytes([signal.SIGUSR1])

    async def program() -> Any:
        heard = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set_result, "heard")
        target = threading.get_ident()
        for delay, call, words in (
            (0.03, signal.pthread_kill, (target, signal.SIGUSR1)),
            (0.1, native.cancel, (context,)),
        ):
            threading.Timer(delay, call, words).start()
        assert native.decode(context, *ENDLESS) == 2
        return await asyncio.wait_for(heard, LONG)

    assert asyncio.run(program()) == "heard"


@pytest.mark.regression(
    "Ctrl-C waited until a decode in C had ended", by="measurement", of="Python"
)
def test_ctrl_c_in_asyncio_cancels_the_task(native: Local, context: ContextHandle) -> None:
    """The handler of asyncio returns at the first Ctrl-C and raises at the second."""
    target = threading.get_ident()
    timers = [
        threading.Timer(delay, signal.pthread_kill, (target, signal.SIGINT))
        for delay in (0.03, 0.1)
    ]

    async def program() -> None:
        for each in timers:
            each.start()
        native.decode(context, *ENDLESS)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(program())
    finally:
        signal.signal(signal.SIGINT, before)
        for each in timers:
            each.join(LONG)
