"""Signals during decodes of real builds, in this process and in a worker."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant

pytestmark = [pytest.mark.native, pytest.mark.slow]


class Interrupt(BaseException):
    """The exception of a handler."""


@contextmanager
def interrupted(delay: float) -> Iterator[None]:
    """Expect an exception of a handler whose signal is sent after some seconds."""

    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    words = (threading.get_ident(), signal.SIGUSR1)
    timer = threading.Timer(delay, signal.pthread_kill, words)
    timer.start()
    try:
        with pytest.raises(Interrupt):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "worker"])
def test_a_signal_ends_a_decode_and_keeps_what_is_complete(
    variant: Variant, isolated: bool
) -> None:
    """A batch is rolled back within its time; steps are kept, and no token is wrong."""
    prompt = [3 + i % 50 for i in range(2000)]
    with (
        kv.open(variant.folder, isolated=isolated) as library,
        library.load_model(synthetic_models.model("deep")) as model,
        model.context(n_ctx=2048, n_batch=2000, n_ubatch=2000, n_threads=1) as ctx,
        model.sampler(temperature=0.0) as greedy,
    ):
        one = ctx.sequence()
        with interrupted(0.1):
            one.prefill(prompt)  # one batch, of more than a second
        assert one.tokens == []
        assert ctx.kv.stats.used == 0
        one.prefill(prompt[:4])
        expected = ctx.advance([one], [3], 300, greedy)
        one.trim(4)
        with interrupted(0.2):
            ctx.advance([one], [3], 300, greedy)
        assert 4 < len(one) < 304
        assert one.tokens[4:] == [3, *(row[0] for row in expected)][: len(one) - 4]
        assert ctx.kv.stats.used == len(one)
        steps = len(one) - 4
        # The token that was sampled last continues the text.
        rest = ctx.advance([one], expected[steps - 1], 3, greedy)
        assert rest == expected[steps : steps + 3]
        logits = ctx.logits().copy()
        with model.context(n_ctx=2048, n_threads=1) as fresh:
            other = fresh.sequence()
            other.prefill(one.tokens)
            assert np.abs(fresh.logits().copy() - logits).max() < 1e-2
