"""The section that interrupts operations: it finds what an interrupt may break."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit
from native_kit import built

from qa import interrupts
from qa.entry import StressOptions

if TYPE_CHECKING:
    from pathlib import Path


def test_the_exception_is_raised_in_the_block_or_never() -> None:
    """A signal that is due after the block is not sent, and the handler is restored."""
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(interrupts.Interrupted), interrupts.signalled(0.01) as sent:
        end = time.thread_time() + 10
        while time.thread_time() < end:  # the delay is in CPU time
            pass
    assert len(sent) == 1
    with interrupts.signalled(10) as sent:
        pass
    assert sent == []
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.slow
def test_lost_cells_and_wrong_tokens_are_defects(tmp_path: Path) -> None:
    """Each check detects a planted defect, and nothing without one."""
    run = interrupts.Interrupts(kit.model(tmp_path), 1)
    one = run.sequences[0]
    one.prefill([4, 5, 6])
    run._check("nothing")
    assert run.defects == []
    assert run.checked == 1
    run.context.native.seq_rm(run.context.handle, one.id, 3, -1)
    run._check("lost")
    assert "end at 2, its ledger at 3" in run.defects[0]
    run.defects.clear()
    one.ledger.tokens[0] = 9
    run._check("wrong")
    assert any("logits are off" in each for each in run.defects)
    run.close()


@pytest.mark.native
@pytest.mark.slow
def test_memory_that_grows_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor and some memory per interrupted operation are found; without them, nothing."""
    monkeypatch.setattr(interrupts, "INTERRUPTS", 100)
    name, effort = f"{interrupts.TEST_RELEASE} bytes", StressOptions(seconds=60)
    built(f"{interrupts.TEST_RELEASE}+patched")
    good = interrupts.entry(name, effort, lambda _: None)
    assert good.defects == ()
    assert int(good.row["in an operation"]) >= 100
    kept: list[object] = []
    check = interrupts.Interrupts._check

    def leaking(run: interrupts.Interrupts, operation: str) -> None:
        kept.append((os.dup(0), bytearray(1 << 16)))
        check(run, operation)

    monkeypatch.setattr(interrupts.Interrupts, "_check", leaking)
    try:
        bad = interrupts.entry(name, effort, lambda _: None)
    finally:
        for descriptor, _ in kept:
            os.close(descriptor)
    assert any("heap memory grows" in each for each in bad.defects)
    assert any("fds grow" in each for each in bad.defects)
