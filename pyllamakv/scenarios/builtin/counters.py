"""The counters of a context: slot searches, slot failures, defragmentations and moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability, DecodeStatus
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Counters
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Count a decode, a failure and a defragmentation, and compare with the cells."""
    lab.needs(Capability.COUNTERS)
    player = lab.player(256, n_ubatch=32)
    start = lab.counters(player)
    player.fill({0: 64, 1: 64}, interleave=True)
    filled = lab.counters(player) - start
    lab.expect(
        filled.slot_searches >= 4,
        f"128 tokens in 4 micro-batches: expected at least 4 slot searches, counted {filled}",
    )
    lab.expect(
        filled.slot_failures == 0,
        f"no decode failed, but {filled.slot_failures} slot failures were counted",
    )

    before = lab.counters(player)
    player.decode({2: 160}, expect=DecodeStatus.NO_SLOT)
    failed = lab.counters(player) - before
    lab.expect(
        failed.slot_failures >= 1, "a decode that found no slot was not counted as a slot failure"
    )
    _full(lab, player)

    player.remove(1)
    if not lab.native.about.capabilities & Capability.DEFRAG:
        return
    there = player.snapshot()
    before = lab.counters(player)
    player.defrag()
    worked = lab.counters(player) - before
    after = player.snapshot()
    lab.expect(worked.defrags == 1, f"one defragmentation was counted as {worked.defrags}")
    if there is not None and after is not None:
        moved = int((there.streams[0].used & ~after.streams[0].used).sum())
        lab.expect(
            worked.cells_moved >= moved and worked.moves >= 1,
            f"{moved} cells moved, but {worked.cells_moved} in {worked.moves} moves were counted",
        )
    lab.expect(
        worked.decode_retries == 0,
        f"a requested defragmentation was counted as {worked.decode_retries} retries of a decode",
    )
    _compare(lab, player, worked)
    _long_runs(lab)
    lab.note(moves=worked.moves, cells=worked.cells_moved, bytes=worked.bytes_moved)


def _full(lab: Lab, player: Player) -> None:
    """Refuse a token in a full cache: no defragmentation helps, so its slot is not searched again.

    Leaves the cache as it was.
    """
    player.fill({2: player.free})
    before = lab.counters(player)
    player.decode({2: 1}, expect=DecodeStatus.NO_SLOT)
    full = lab.counters(player) - before
    lab.expect(
        full.slot_searches == full.slot_failures == 1,
        f"one token in a full cache: expected one slot search that fails, counted {full}",
    )
    player.remove(2)


def _compare(lab: Lab, player: Player, worked: Counters) -> None:
    """Compare the counters of a defragmentation with its work; then force one in a decode."""
    info = player.native.cells(player.context, 0).info
    row = (info.bytes_k + info.bytes_v) // info.n_cells
    lab.expect(
        worked.bytes_moved == row * worked.cells_moved,
        f"{worked.cells_moved} cells of {row} bytes moved, but {worked.bytes_moved} bytes were "
        f"counted",
    )
    lab.expect(
        worked.ns >= worked.plan_ns > 0,
        f"expected 0 < plan time <= total time, counted {worked.plan_ns} and {worked.ns} ns",
    )
    lab.expect(
        worked.ns < 60 * 10**9, f"a defragmentation of 256 cells was counted as {worked.ns} ns"
    )
    # Totals since the start; -1 means not counted.
    graphs, most = lab.counters(player).graphs, lab.counters(player).scratch_bytes
    right = graphs > 0 if info.host == 0 else graphs == 0
    lab.expect(
        right,
        f"{graphs} graphs were counted for memory of "
        f"{'a device' if info.host == 0 else 'the host'}",
    )
    lab.expect(0 <= most <= 1 << 20, f"expected 0 to {1 << 20} scratch bytes, counted {most}")

    player.fill({1: 64, 2: 64}, interleave=True)
    player.remove(1)
    before = lab.counters(player)
    player.decode({3: 100})
    again = lab.counters(player) - before
    # Both are zero where a batch may use scattered cells.
    lab.expect(
        again.decode_retries == again.defrags,
        f"a decode counted {again.defrags} defragmentations, but {again.decode_retries} retries",
    )


def _long_runs(lab: Lab) -> None:
    """Move a block of cells: it is counted in runs and in cells."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 64})
    player.fill({1: 64})
    player.remove(0, 0, 32)
    before = lab.counters(player)
    player.defrag()
    worked = lab.counters(player) - before
    lab.expect(
        0 < worked.moves < worked.cells_moved,
        f"{worked.cells_moved} cells of one block moved, but {worked.moves} moves were counted",
    )


SCENARIO = Scenario(
    id="counters",
    kind="feature",
    claim=(
        "The counters agree with the slot searches, failures, defragmentations and moves "
        "of a context."
    ),
    issue="ggml-org/llama.cpp#13653",
    run=run,
    settings=PLAIN,
)
