"""Test calls to a worker under concurrency, signals and forks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fakes.build import HANG, SLOW
from fakes.opened import LONG, reaped, until

from pyllamakv.binding import remote as binding
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.process import CANCEL
from pyllamakv.binding.protocol import (
    ContextHandle,
    ContextParams,
    ModelHandle,
    ModelParams,
    SamplerParams,
)
from pyllamakv.binding.remote import Remote
from pyllamakv.binding.signal_check import take_run
from pyllamakv.binding.wire import Channel
from pyllamakv.errors import (
    Busy,
    Closed,
    DeviceLost,
    NativeError,
    UsageError,
    WorkerDied,
)

pytest_plugins = ("fakes.opened",)


@pytest.fixture
def native(remote: Remote) -> Remote:
    """Open a library in a worker only."""
    return remote


def test_worker_with_a_device_error_raises_device_lost(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends with a device error raises DeviceLost."""
    monkeypatch.setattr(
        remote._process, "tail", lambda: ("CUDA error: an illegal memory access", "end")
    )
    os.kill(remote.pid, signal.SIGKILL)
    with pytest.raises(DeviceLost):
        remote.logs()


def test_second_thread_waits_for_the_worker(
    remote: Remote, model: ModelHandle, context: ContextHandle
) -> None:
    """Threads on different contexts wait for each other."""
    other = remote.context_new(model, ContextParams())
    found: list[int] = []
    slow = ([SLOW], [0], None, (0,), None)
    thread = threading.Thread(target=lambda: found.append(remote.decode(context, *slow)))
    thread.start()
    assert [remote.decode(other, [1], [pos], None, (0,), None) for pos in range(5)] == [0] * 5
    thread.join(LONG)
    assert found == [0]


def test_closing_during_a_call_ends_it_with_an_error(
    remote: Remote, context: ContextHandle
) -> None:
    """If close() of another thread interrupts a call, it and the next one raise an error."""
    found: list[BaseException] = []

    def hang() -> None:
        try:
            remote.decode(context, [HANG], [0], None, (0,), None)
        except NativeError as error:
            found.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    until(lambda: remote._working)
    remote.close()
    thread.join(LONG)
    assert isinstance(found[0], WorkerDied)
    assert reaped(remote.pid)
    with pytest.raises(Closed):
        remote.cancel(context)


@contextlib.contextmanager
def handling(handler: Callable[[int, object], None], delay: float) -> Iterator[None]:
    """Run a signal handler in this thread after some seconds; not with the timeout's signal."""
    old = signal.signal(signal.SIGUSR1, handler)
    main = threading.get_ident()
    timer = threading.Timer(delay, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join(LONG)
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_and_keeps_the_worker(remote: Remote, context: ContextHandle) -> None:
    """Ctrl-C ends the wait, not the worker; the late response is not used for the next call."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handling(handler, 0.2), pytest.raises(KeyboardInterrupt):
        remote.decode(context, [HANG], [0], None, (0,), None)
    remote.cancel(context)
    assert remote.seq_pos_max(context, 0) == -1
    assert remote.decode(context, [1], [0], None, (0,), None) == 0
    assert remote.seq_pos_max(context, 0) == 0


@pytest.mark.parametrize("kind", [TimeoutError, ConnectionResetError, EOFError])
def test_errors_of_a_handler_are_not_those_of_the_socket(
    remote: Remote, context: ContextHandle, kind: type[Exception]
) -> None:
    """A handler, as of `signal.alarm`, raises in the wait: the worker stays alive."""

    def handler(number: int, frame: object) -> None:
        raise kind("of the handler")

    with handling(handler, 0.03), pytest.raises(kind, match="of the handler"):
        remote.decode(context, [HANG], [0], None, (0,), None)
    remote.cancel(context)
    assert remote.seq_pos_max(context, 0) == -1


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
def test_an_interrupt_beside_a_whole_message_keeps_the_worker(
    remote: Remote, model: ModelHandle, context: ContextHandle, sent: bool
) -> None:
    """Ctrl-C before the first byte of a request, and after the last one."""
    sampler = remote.sampler_new(model, SamplerParams(temperature=0.0))
    send = remote._channel.send

    def interrupt(*words: Any) -> None:
        patch.undo()
        if sent:
            send(*words)
        raise KeyboardInterrupt

    for work in (
        lambda: remote.decode(context, [1], [0], None, (0,), None),
        lambda: remote.context_new(model, ContextParams()),
        lambda: remote.run(sampler, context, [3], [1], (0,), 1, False),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(remote._channel, "send", interrupt)
            work()
    assert remote.seq_pos_max(context, 0) >= (0 if sent else -1)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Busy])
def test_an_interrupted_run_has_its_completed_steps(
    remote: Remote, model: ModelHandle, context: ContextHandle, kind: type[BaseException]
) -> None:
    """A handler raises in the wait: the exception has the steps that the worker made."""
    sampler = remote.sampler_new(model, SamplerParams(temperature=0.0))

    def interrupt(operation: str) -> None:
        patch.undo()
        raise kind

    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind) as caught:
        patch.setattr(remote, "_receive", interrupt)
        remote.run(sampler, context, [3], [0], (0,), 4, False)
    completed = take_run(caught.value)
    # The cancel may have ended it.
    assert completed is None or completed[1]
    assert remote.seq_pos_max(context, 0) == (len(completed[1]) if completed else 0) - 1
    # The fake keeps a cancel that arrived after the run.
    assert remote.decode(context, [1], [4], None, (0,), None) in {0, 2}


def test_a_handler_that_raises_in_a_block_ends_the_decode_of_the_worker(
    remote: Remote, context: ContextHandle
) -> None:
    """The block gets the status of a cancel, and then the exception is raised."""
    codes: list[int] = []

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handling(handler, 0.05), pytest.raises(KeyboardInterrupt), Uninterrupted():
        codes.append(remote.decode(context, [HANG], [0], None, (0,), None))
    assert codes == [2]


class SmallParts:
    """A socket that receives little at once."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def recv(self, size: int) -> bytes:
        """Receive at most 64 bytes."""
        found: bytes = self.sock.recv(min(size, 64))
        return found

    def recv_into(self, buffer: Any) -> int:
        """Receive half of what is wanted."""
        count: int = self.sock.recv_into(buffer[: (len(buffer) + 1) // 2])
        return count


@pytest.mark.regression(
    "with isolated=True, a call hung, or its worker was ended, after a signal handler raised while "
    "an answer arrived",
    by="hostile input",
    of="Python",
)
def test_an_interrupt_as_an_answer_arrives_loses_nothing(
    remote: Remote, context: ContextHandle
) -> None:
    """A handler raises before any line that receives: the late answer is complete."""
    remote.decode(context, [1], [0], None, (0,), None)
    expected, number, left = remote.cells(context, 0), 0, 0
    remote._channel.sock = SmallParts(remote._channel.sock)  # type: ignore[assignment]
    receiving = {
        *(getattr(Channel, name).__code__ for name in ("answer", "_receive", "_begin", "_fill")),
        Remote._receive.__code__,
    }

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in receiving:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    while left <= 0:
        number += 1
        left = number
        try:
            sys.settrace(trace)
            found = remote.cells(context, 0)
        except KeyboardInterrupt:
            found = remote._late_answer("cells", remote._number)
        finally:
            sys.settrace(before)
        assert (found.pos - expected.pos == number).all()  # the fake counts reads
    assert number > 50


@pytest.mark.slow
def test_a_late_cancel_does_not_end_the_next_decode(remote: Remote, context: ContextHandle) -> None:
    """A cancel has the number of its request."""
    control, late = remote._process.control, remote._number
    code: list[int] = []

    def decode() -> None:
        code.append(remote.decode(context, [HANG], [0], None, (0,), None))

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join(0.2)
    control.send(CANCEL.pack(context, late))
    thread.join(0.2)
    assert thread.is_alive()
    remote.cancel(context)
    thread.join(LONG)
    assert code == [2]


def test_worker_ignores_sigint_of_its_process_group(remote: Remote, context: ContextHandle) -> None:
    """The worker gets a terminal's signal too, and ignores it; its parent decides."""
    os.kill(remote.pid, signal.SIGINT)
    assert remote.decode(context, [1], [0], None, (0,), None) == 0


@pytest.mark.slow
def test_calls_from_a_signal_handler_are_refused(remote: Remote, context: ContextHandle) -> None:
    """A handler that calls during a call is refused; objects that it frees are freed later."""
    seen: list[BaseException | None] = []
    extra = remote.model_load("extra", ModelParams())

    def handler(number: int, frame: object) -> None:
        try:
            remote.seq_pos_max(context, 0)
        except Busy as error:
            seen.append(error)
        remote.model_free(extra)

        remote.cancel(context)

    with handling(handler, 0.2):
        assert remote.decode(context, [HANG], [0], None, (0,), None) == 2
    assert isinstance(seen[0], Busy)
    with pytest.raises(Closed):
        remote.model_info(extra)


def test_forked_child_does_not_use_the_worker(remote: Remote, context: ContextHandle) -> None:
    """A forked child inherits the sockets, and must not use them or end the worker."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            remote.seq_pos_max(context, 0)
        except Closed:
            remote.context_free(context)
            remote.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert remote.decode(context, [1], [0], None, (0,), None) == 0


def test_cancel_of_a_closed_context_does_nothing(remote: Remote, context: ContextHandle) -> None:
    """A cancel after the end does nothing."""
    remote.context_free(context)
    remote.cancel(context)
    remote.cancel(ContextHandle(12345))
    assert remote.logs() is not None


def test_invalid_requests_keep_the_worker_alive(remote: Remote, context: ContextHandle) -> None:
    """Only operations are accepted, and an invalid argument does not end the worker."""
    for name in ("_lib", "__init__", "nothing"):
        with pytest.raises(UsageError, match="not an operation"):
            remote._ask(name)
    with pytest.raises(TypeError):
        remote._ask("seq_rm", context)
    with pytest.raises(OverflowError):
        remote.seq_rm(context, 1 << 40, 0, 0)
    with pytest.raises(TypeError, match="cannot be sent"):
        remote.decode(
            context,
            np.zeros(1, np.complex64),  # type: ignore[arg-type]
            np.zeros(1, np.int32),
            None,
            np.zeros(1, np.int32),
            None,
        )
    assert remote.seq_pos_max(context, 0) == -1


def test_states_of_megabytes_pass_the_socket(remote: Remote, model: ModelHandle) -> None:
    """Megabytes are transferred in both directions."""
    context = remote.context_new(model, ContextParams(n_ctx=1 << 18))
    state = bytes(range(256)) * (1 << 12)
    assert remote.state_load(context, 1, state) == 1 << 20
    assert remote.state_save(context, 0) == state
    assert remote.cells(context, 0).pos.shape == (1 << 18,)


def test_sampler_handles_work_in_a_worker(
    remote: Remote, model: ModelHandle, context: ContextHandle
) -> None:
    """Handles of all kinds work in a worker."""
    sampler = remote.sampler_new(model, SamplerParams())
    remote.decode(context, [5], [0], None, (0,), None)
    assert remote.sample(sampler, context, -1) == 6


@pytest.mark.parametrize("late", [False, True], ids=["before the answer", "after the answer"])
def test_creation_that_a_signal_interrupts_is_freed_before_the_next_call(
    remote: Remote, model: ModelHandle, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker created the context, but no caller has its handle."""
    seen: list[str] = []
    send = remote._channel.send
    monkeypatch.setattr(
        remote._channel, "send", lambda n, head, body: (seen.append(head[0]), send(n, head, body))
    )
    target, name = (binding, "forward") if late else (remote._channel, "answer")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, name, Mock(side_effect=KeyboardInterrupt))
        remote.context_new(model, ContextParams())
    assert seen == ["context_new"]
    remote.context_new(model, ContextParams())
    assert seen == ["context_new", "context_free", "context_new"]
