"""The section that interrupts operations: it finds what an interrupt may break."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit

from qa import interrupts

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
