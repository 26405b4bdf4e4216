"""Open the fake library, here and in a worker, with helpers for tests of the binding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fakes.build import fake

from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import (
    ContextHandle,
    ContextParams,
    ModelHandle,
    ModelParams,
    Native,
)
from pyllamakv.binding.remote import Remote

#: Seconds after which something has hung.
LONG = 120.0


@pytest.fixture(params=[Local, Remote], ids=["local", "remote"])
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    """Open the fake library in this process, then in a worker."""
    opened = request.param(fake())
    yield opened
    opened.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    """Open the fake library in a worker."""
    opened = Remote(fake())
    yield opened
    opened.close()


@pytest.fixture
def model(native: Native) -> ModelHandle:
    """Load the fake model."""
    return native.model_load("fake.gguf", ModelParams())


@pytest.fixture
def context(native: Native, model: ModelHandle) -> ContextHandle:
    """Make a context of 64 cells."""
    params = ContextParams(n_ctx=64, n_batch=32, n_ubatch=16, n_seq_max=8)
    return native.context_new(model, params)


def feed(native: Native, context: ContextHandle, seq: int, n: int, start: int = 0) -> int:
    """Decode n tokens of one sequence."""
    pos = np.arange(start, start + n, dtype=np.int32)
    return native.decode(context, pos, pos, None, np.full(n, seq, np.int32), None)


def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def reaped(pid: int) -> bool:
    """Return whether a child process has ended and is not a zombie."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False
