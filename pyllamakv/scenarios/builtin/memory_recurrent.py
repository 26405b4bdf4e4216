"""A recurrent model has one state per sequence and no cells. Operations are exact or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import Unsupported
from pyllamakv.scenarios.memory_checks import (
    exercise_memory,
    require_deterministic,
    supported,
    verify_memory,
)
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Run every operation on a recurrent memory, then a batch of two micro-batches."""
    player = lab.player(256, n_ubatch=128, n_seq_max=4)
    counted = player.counters()
    lab.expect(counted is None, f"a memory without cells reports counters: {counted}")
    _no_cells_to_move(lab, player)
    require_deterministic(lab, player)
    exercise_memory(lab, player, moves=False)
    lab.note(split=supported(lambda: player.decode({0: 160})))
    verify_memory(lab, player)
    if player.native.about.probes.get("rollback") == "patched":
        _aborted(lab)


def _no_cells_to_move(lab: Lab, player: Player) -> None:
    """Defragment, which must be refused: this memory has no cells."""
    try:
        player.defrag()
    except Unsupported:
        return
    lab.expect(False, "a defragmentation of a memory without cells was not refused")


def _aborted(lab: Lab) -> None:
    """Abort a decode: the state is partly advanced, and none of its tokens may remain.

    Through 0.3.8, upstream behaves like this, and a patch rolls back. Later releases keep such
    states.
    """
    player = lab.player(256, n_ubatch=128, n_seq_max=4)
    player.fill({0: 20})
    player.fill({1: 12})
    player.cancel_after(3)
    player.decode({0: 24}, expect=DecodeStatus.ABORTED)
    left = [player.native.seq_pos_max(player.context, seq) for seq in (0, 1)]
    lab.expect(
        left == [-1, -1],
        f"the last positions after an aborted decode are {left}, expected [-1, -1]",
    )


SCENARIO = Scenario(
    id="memory-recurrent",
    kind="guard",
    claim="The states of a recurrent model are correct after every operation.",
    issue="ggml-org/llama.cpp#19794",
    run=run,
    model="recurrent",
    settings=PLAIN[:1],
)
