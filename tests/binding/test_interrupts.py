"""Test signals during a change of the cache: cells and ledgers agree afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

from pyllamakv.binding import interrupts, signal_check
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.errors import Cancelled
from pyllamakv.runtime import decoder, ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyllamakv.runtime.sequence import Sequence


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Handle SIGINT as Python does, whatever ran before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_block_is_completed_before_the_interrupt_is_raised() -> None:
    """Check nested blocks, a decorated function, and an exception of the block itself."""
    done = []

    @Uninterrupted()
    def change() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("change")

    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        change()
        done.append("block")
    assert done == ["change", "block"]
    with pytest.raises(KeyboardInterrupt) as caught, Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_of_several_signals_the_last_exception_is_raised() -> None:
    """A second Ctrl-C while a large page is written does not damage the cache."""
    done = []
    end = handling(signal.SIGTERM, lambda *_: sys.exit(3))
    with pytest.raises(SystemExit), end, Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        done.append("block")
    assert done == ["block"]


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal until the end of the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("begins", [True, False])
def test_a_signal_as_handlers_are_replaced_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """A handler raises as the block begins or ends: the others are restored, no decode ends."""
    real = interrupts._signal.signal

    def interrupted(number: int, handler: Any) -> None:
        if number == signal.SIGINT and begins:
            signal.raise_signal(number)
        real(number, handler)
        if number == signal.SIGINT and not begins and handler is signal.default_int_handler:
            signal.raise_signal(number)

    with handling(signal.SIGHUP, print), handling(signal.SIGUSR1, list):
        monkeypatch.setattr(interrupts._signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), Uninterrupted():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGHUP) is print
        assert signal.getsignal(signal.SIGUSR1) is list
    assert Uninterrupted._outer is None
    assert not signal_check.CancelRequest.made


def test_handlers_run_at_once_and_one_that_returns_changes_nothing() -> None:
    """Check a handler of the program, one that sets another, and one that is kept after it."""
    got: list[int] = []
    with handling(signal.SIGINT, lambda number, _: got.append(number)), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT]
        assert not signal_check.CancelRequest.made
    kept: list[Any] = []
    with handling(signal.SIGTERM, lambda *_: kept.append(signal.signal(signal.SIGTERM, print))):
        with Uninterrupted():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is print
        signal.signal(signal.SIGTERM, kept[0])  # calls the former handler
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is print
    with handling(signal.SIGINT, signal.SIG_IGN), Uninterrupted():
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_is_set_in_a_block_raises_at_its_end() -> None:
    """Ctrl-C twice: the first handler sets the one that raises for the second."""
    done: list[str] = []

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with handling(signal.SIGINT, first):
        with pytest.raises(KeyboardInterrupt), Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("block")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done == ["block"]


def test_all_handlers_are_restored_though_two_raise_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each raises as soon as it is restored; the exception of the last one is raised."""
    real = interrupts._signal.signal

    def interrupted(number: int, handler: Any) -> None:
        real(number, handler)
        if handler in (ends, signal.default_int_handler):
            signal.raise_signal(number)

    def ends(*_: object) -> None:
        sys.exit(3)

    with handling(signal.SIGTERM, ends), handling(signal.SIGUSR1, ends), handling(1, print):
        monkeypatch.setattr(interrupts._signal, "signal", interrupted)
        with pytest.raises((SystemExit, KeyboardInterrupt)), Uninterrupted():
            pass
        monkeypatch.undo()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            assert signal.getsignal(number) is ends
        assert signal.getsignal(signal.SIGHUP) is print
    assert Uninterrupted._outer is None


def test_a_process_that_another_thread_forks_in_a_block_has_its_handlers() -> None:
    """Their exceptions are raised there, and no block is open."""
    found: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os._exit(0 if restored and Uninterrupted._outer is None else 1)
        found.append(os.waitpid(child, 0)[1])

    with Uninterrupted():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert found == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="the place of the flags is that of Linux")
def test_the_system_restarts_calls_after_a_block_as_before() -> None:
    """`signal.siginterrupt`, which asyncio calls, stays in effect."""

    def flags() -> bytes:  # after the handler and the mask, in Linux
        return bytes(signal_check.SignalAction(signal.SIGUSR1)._action)[136:140]

    with handling(signal.SIGUSR1, print):
        signal.siginterrupt(signal.SIGUSR1, False)
        before = flags()
        with Uninterrupted():
            assert flags() != before
        assert flags() == before


def test_other_threads_are_unchanged() -> None:
    """Python runs no handlers there."""
    found: list[Any] = []

    def other() -> None:
        with Uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


CHANGES: dict[str, Callable[[Sequence, Sequence], object]] = {
    "remove": lambda one, _: one.remove(2, 4),
    "trim": lambda one, _: one.trim(3),
    "restore": lambda one, other: other.restore(one.save(portable=False)),
    "shift": lambda one, _: one.shift(3, None, 5),
    "divide": lambda one, _: one.divide(2, None, 2),
    "share": lambda one, other: other.share(one, 1, 3),
    "copy_to": lambda one, other: one.copy_to(other, 3),
    "fork": lambda one, _: one.fork(3),
    "close": lambda one, _: one.close(),
    "clear": lambda one, _: one.context.clear(),
}


@pytest.mark.regression(
    "after a signal while cells were removed or shared, a sequence had tokens without cells, and "
    "later tokens were wrong",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupted_change_is_complete(tmp_path: Path, name: str) -> None:
    """A signal when any call of C returns: cells and ledgers agree."""
    number = 1
    while True:
        context = kit.context(tmp_path)
        one, other = context.sequence(), context.sequence()
        one.prefill([1, 2, 3, 4, 5, 6])
        methods = ("seq_rm", "seq_cp", "seq_add", "seq_div", "clear", "state_load")
        with kit.interrupted(context.native, methods, number) as calls:
            try:
                CHANGES[name](one, other)
            except KeyboardInterrupt:
                assert len(calls) >= number
            else:
                break
        cells = context.kv.snapshot().streams[0]
        for each in (one, other):
            assert sorted(cells.pos[cells.has(each.id)].tolist()) == each.positions
        # A fork that was not returned is closed.
        assert len(context.vacant) == context.info.n_seq_max - one.open - other.open
        number += 1
    assert number > 1


@contextmanager
def interrupted_line(number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before a line of the decoder or of a ledger; count them from 1.

    Yields a list with the number of lines so far.
    """
    files, lines = {decoder.__file__, ledger.__file__}, [0]

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


DECODES: dict[str, Callable[[Sequence, Sequence, Any], object]] = {
    "step": lambda one, _two, _sampler: one.step(7),
    "step_all": lambda one, two, _sampler: one.context.step_all([one, two], [7, 8]),
    "batch": lambda one, two, _sampler: one.context.decode([one.feed([7, 8]), two.feed([9])]),
    "prompt": lambda one, _two, _sampler: one.context.decode([one.feed([7, 8, 9])]),
    "advance": lambda one, two, sampler: one.context.advance([one, two], [7, 8], 2, sampler),
}


@pytest.mark.regression(
    "Ctrl-C between a decode and its record left cells that no sequence had, and dropped the "
    "completed steps of `advance`",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize("name", DECODES)
def test_an_interrupted_decode_is_recorded_or_undone(tmp_path: Path, name: str) -> None:
    """Ctrl-C before each line: cells and ledgers agree, and completed steps are kept."""
    context = kit.context(tmp_path)
    sampler = context.model.sampler(temperature=0.0)
    number, kept = 1, set()
    while True:
        one, two = context.sequence(), context.sequence()
        one.prefill([1, 2, 3])
        two.prefill([4, 5])
        before = [*one.tokens], [*two.tokens]
        ended = False
        with interrupted_line(number) as lines:
            try:
                DECODES[name](one, two, sampler)
                ended = True
            except KeyboardInterrupt as error:
                if "__notes__" in vars(error):
                    assert error.__notes__[0].startswith(f"{len(one) - 3} of 2 steps are complete")
        kept.add(len(one) - 3)
        cells = context.kv.snapshot().streams[0]
        for each, start in zip((one, two), before, strict=True):
            own = each.ledger
            assert sorted(cells.pos[cells.has(each.id)].tolist()) == each.positions
            assert len(own.tokens) == len(own.positions) == len(own.marks) == own.next
            assert each.tokens[: len(start)] == start
        one.close()
        two.close()
        if ended and lines[0] < number:
            break
        number += 1
    # The steps of `advance` are one call of C: it was undone as it ended, or recorded whole.
    assert kept >= ({0, 2} if name == "advance" else {0})


def test_two_handlers_that_raise_after_a_decode_leave_no_cell(tmp_path: Path) -> None:
    """The handler of the second one raises before the rollback begins."""
    context = kit.context(tmp_path)
    one, numbers = context.sequence(), (signal.SIGINT, signal.SIGTERM)
    real = context.native.decode

    def decode(*words: Any) -> int:
        code = real(*words)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        return code

    end = handling(signal.SIGTERM, lambda *_: sys.exit(3))
    with end, pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(context.native, "decode", decode)
        one.step(3)
    assert context.kv.stats.used == len(one) == 0


def test_a_signal_in_a_block_ends_its_decode(tmp_path: Path) -> None:
    """The block gets Cancelled, and then the handler is called."""
    context = kit.context(tmp_path)
    one = context.sequence()
    real = context.native.decode

    def decode(*words: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        if signal_check.check():  # as the library does
            context.native.cancel_after(context.handle, 0)
        return real(*words)

    with pytest.raises(KeyboardInterrupt) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.native, "decode", decode)
        with Uninterrupted():
            one.step(3)
    assert isinstance(caught.value.__context__, Cancelled)
    assert not signal_check.CancelRequest.made
    context.native.cancel_after(context.handle, -1)
    one.step(3)
    assert len(one) == 1
