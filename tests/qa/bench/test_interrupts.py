"""Test that the latency of signals has all its samples."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

from pyllamakv.errors import HarnessError
from qa.bench import interrupts


def busy(seconds: float) -> None:
    """Use the CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.slow
def test_a_call_that_ends_before_its_signal_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls are shorter than the first; their signals come sooner, until one is in time."""
    monkeypatch.setattr(interrupts, "unchecked", nullcontext)
    lengths = iter([0.2])
    after, before = interrupts.latencies(None, lambda: busy(next(lengths, 0.02)), lambda: None)
    assert (len(after), len(before)) == (interrupts.INTERRUPTS, interrupts.WITHOUT)
    assert min(after) >= 0


def test_calls_that_no_signal_meets_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no figure with fewer samples."""
    calls: list[Any] = []
    with pytest.raises(HarnessError, match="ended before their signals"):
        interrupts.sample(lambda: calls.append(1), 1e6)
    assert len(calls) == interrupts.TRIES
