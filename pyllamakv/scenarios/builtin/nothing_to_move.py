"""A hundred decodes into a full, compact cache do no additional work and log nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability, Counters, DecodeStatus
from pyllamakv.errors import Unsupported
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: Counters of work that a cache without holes does not need.
MOVE_COUNTERS = ("moves", "cells_moved", "bytes_moved", "graphs")
TIMES = 50


def run(lab: Lab) -> None:
    """Defragment without moves, then decode batches that fit and batches that do not."""
    player = lab.player(256)
    player.fill({0: 256})
    if lab.native.about.capabilities & Capability.DEFRAG:
        player.remove(0, 255)
        lab.logs()
        try:
            player.defrag()
        except Unsupported:
            lab.note(defrag="refused")
        # At debug level, llama.cpp logs the graphs that it reserves.
        lines = [line for line in lab.logs(0) if "reserving" in line]
        lab.expect(not lines, f"a defragmentation without moves reserved graphs: {lines[:1]}")
        player.decode({0: 1})
    lab.logs()
    fitting = [_repeat(player, fits=True) for _ in range(2)]
    lines = lab.logs()
    lab.expect(
        not lines, f"{2 * TIMES} decodes on a full cache logged: {lines[0] if lines else ''}"
    )
    failing = [_repeat(player, fits=False) for _ in range(2)]
    lines = lab.logs()
    # llama.cpp itself logs two lines per decode without a slot.
    lab.expect(
        len(lines) <= 2 * 2 * TIMES,
        f"{2 * TIMES} failed decodes logged {len(lines)} lines: {lines[-1] if lines else ''}",
    )
    for name, (first, second) in (("fitting", fitting), ("failing", failing)):
        if first is None or second is None:
            continue
        work = {what: getattr(first, what) + getattr(second, what) for what in MOVE_COUNTERS}
        lab.expect(not any(work.values()), f"{name} decodes on a full cache moved cells: {work}")
        for what in ("slot_searches", "slot_failures", "defrags"):
            one, two = getattr(first, what), getattr(second, what)
            lab.expect(
                one == two,
                f"{name} decodes: {what} differs between two equal rounds, {one} and {two}",
            )
    _scattered(lab, player)
    player.remove(0, 250)
    lab.verify(player)


def _scattered(lab: Lab, player: Player) -> None:
    """Request more cells than are free: a defragmentation would not help."""
    for pos in (10, 100, 200):
        player.remove(0, pos, pos + 1)
    before = player.counters()
    player.decode({1: 4}, expect=DecodeStatus.NO_SLOT)
    after = player.counters()
    if before is not None and after is not None:
        moves = (after - before).moves
        lab.expect(moves == 0, f"a decode that needs more cells than are free made {moves} moves")


def _repeat(player: Player, *, fits: bool) -> Counters | None:
    before = player.counters()
    for _ in range(TIMES):
        if fits:
            player.remove(0, 255)
            player.decode({0: 1})
        else:
            player.decode({1: 4}, expect=DecodeStatus.NO_SLOT)
    after = player.counters()
    return after - before if before is not None and after is not None else None


SCENARIO = Scenario(
    id="nothing-to-move",
    kind="guard",
    claim="If no cell needs to move, decodes do no additional work and log nothing.",
    issue="ggml-org/llama.cpp#11707",
    run=run,
    settings=PLAIN,
)
