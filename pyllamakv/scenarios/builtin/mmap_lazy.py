"""A large context commits memory only for cells that were written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.builtin._mapped_memory import (
    committed,
    expect_committed_below,
    mapped,
    reserved,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: Attention visits a multiple of this; visiting unwritten cells commits no memory.
STEP = 256


def run(lab: Lab) -> None:
    """Create a context of 65536 cells, decode 64 tokens, and decode in other sequences."""
    player = mapped(lab, 65536, n_batch=512, n_ubatch=64)
    lab.expect(
        committed(player) == 0, f"{committed(player)} bytes are resident before the first decode"
    )
    player.fill({0: 64})
    expect_committed_below(lab, player, STEP, "after 64 tokens")
    lab.note(reserved=reserved(player))
    lab.expect(
        committed(player) <= reserved(player) // 20,
        f"64 of 65536 cells are used, but {committed(player)} of {reserved(player)} bytes are "
        f"resident",
    )
    player.fill({1: 300, 2: 300}, interleave=True)
    expect_committed_below(lab, player, 664 + STEP, "after 664 tokens")
    lab.verify(player)


SCENARIO = Scenario(
    id="mmap-lazy",
    kind="feature",
    claim="Memory is committed when cells are first written, not when the context is created.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    settings=CACHES,
)
