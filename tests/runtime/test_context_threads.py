"""Test calls of several threads, and cancels, in this process and in a worker."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from fakes.build import HANG, SLOW
from fakes.opened import feed

from pyllamakv.binding.protocol import (
    ContextHandle,
    ContextParams,
    ModelHandle,
    Native,
)

pytest_plugins = ("fakes.opened",)


def test_cancel_after_ends_a_decode_at_the_poll(native: Native, context: ContextHandle) -> None:
    """An abort at a chosen poll ends a decode with 2."""
    native.cancel_after(context, 3)
    assert feed(native, context, 0, 8) == 2
    assert native.cancel_polls(context) == 4
    native.cancel_after(context, -1)
    assert feed(native, context, 0, 8) == 0


def test_cancel_from_another_thread(native: Native, context: ContextHandle) -> None:
    """An endless decode ends if another thread cancels it."""
    done = threading.Event()

    def cancel() -> None:
        while not done.is_set():
            native.cancel(context)
            time.sleep(0.01)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        assert native.decode(context, [HANG], [0], None, (0,), None) == 2
    finally:
        done.set()
        thread.join(120)


def test_the_gil_is_released(native: Native, context: ContextHandle) -> None:
    """Other threads run during a C call: otherwise, the decode could not be cancelled."""
    started, counted = threading.Event(), itertools.count()

    def count() -> None:
        started.wait(120)
        for _ in range(1000):
            next(counted)
        native.cancel(context)
        # The decode may not have begun when the first cancel came.
        while not ended.wait(0.01):
            native.cancel(context)

    ended = threading.Event()
    thread = threading.Thread(target=count)
    thread.start()
    started.set()
    assert native.decode(context, [HANG], [0], None, (0,), None) == 2
    ended.set()
    thread.join(120)
    assert next(counted) == 1000


@pytest.mark.slow
def test_two_contexts_in_two_threads(native: Native, model: ModelHandle) -> None:
    """Different contexts can decode at the same time."""
    contexts = [native.context_new(model, ContextParams()) for _ in range(4)]
    codes: list[int] = []

    def work(context: ContextHandle) -> None:
        codes.extend(native.decode(context, [SLOW], [pos], None, (0,), None) for pos in range(3))

    threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == [0] * 12
