"""The counters tell what a context did: slot searches, failures, defragmentations, moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability, Status
from pyllamakv.harness.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.harness.lab import Lab


def run(lab: Lab) -> None:
    """Count a decode, a failure and a defragmentation, and compare with what the cells show."""
    lab.needs(Capability.COUNTERS)
    player = lab.player(256, n_ubatch=32)
    start = lab.counters(player)
    player.fill({0: 64, 1: 64}, interleave=True)
    filled = lab.counters(player) - start
    lab.expect(filled.slot_searches >= 4, f"128 tokens in fours of 32 counted {filled}")
    lab.expect(filled.slot_failures == 0, f"nothing failed, counted {filled.slot_failures}")

    before = lab.counters(player)
    player.decode({2: 160}, expect=Status.NO_SLOT)
    failed = lab.counters(player) - before
    lab.expect(failed.slot_failures >= 1, "a decode without room counted no slot failure")

    player.remove(1)
    if not lab.native.about.capabilities & Capability.DEFRAG:
        return
    there = player.snapshot()
    before = lab.counters(player)
    player.defrag()
    worked = lab.counters(player) - before
    after = player.snapshot()
    lab.expect(worked.defrags == 1, f"one defragmentation counted as {worked.defrags}")
    if there is not None and after is not None:
        moved = int((there.streams[0].used & ~after.streams[0].used).sum())
        lab.expect(
            worked.cells_moved >= moved and worked.moves >= 1,
            f"{moved} cells were left, counted {worked.cells_moved} in {worked.moves} moves",
        )
    lab.note(moves=worked.moves, cells=worked.cells_moved, bytes=worked.bytes_moved)


SCENARIO = Scenario(
    id="counters",
    kind="feature",
    claim="The counters tell slot searches, failures, defragmentations and moves.",
    issue="ggml-org/llama.cpp#13653",
    run=run,
    settings=PLAIN,
)
