"""Test signals during a change of the cache: cells and ledgers agree afterwards."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

from pyllamakv.runtime.interrupts import Uninterrupted

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
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("block")
    assert done == ["block"]


def test_other_handlers_and_threads() -> None:
    """A handler of the program is called; ignored signals and other threads stay as they are."""
    got: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: got.append(number))
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert got == []
        assert got == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        context.prefill(one, [1, 2, 3, 4, 5, 6])
        methods = ("seq_rm", "seq_cp", "seq_add", "seq_div", "clear")
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
