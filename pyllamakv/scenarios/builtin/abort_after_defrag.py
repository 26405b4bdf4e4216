"""A decode defragments after its first micro-batch and is aborted in a later one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.abort_decode import abort, count_abort_polls
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Abort in the third of four micro-batches, after the defragmentation."""
    # Without abort support, stock would fail before the abort.
    count_abort_polls(lab.player(256, n_ubatch=32), {0: 128})
    measured = _scattered(lab)
    polls = count_abort_polls(measured, {3: 112})
    player = _scattered(lab)
    lab.picture(player, "before")
    before = player.snapshot()
    with player.unchanged("the aborted decode"):
        abort(lab, player, {3: 112}, polls * 5 // 8, polls)
    lab.picture(player, "after")
    after = player.snapshot()
    if before is not None and after is not None and player.info.contiguous_slots:
        moved = before.moves_to(after).cells
        lab.expect(moved > 0, "the decode was aborted before its defragmentation")
    lab.verify(player)
    player.decode({3: 112})
    lab.verify(player)


def _scattered(lab: Lab) -> Player:
    player = lab.player(256, n_ubatch=32)
    player.fill({1: 108, 2: 108}, interleave=True)
    player.fill({0: 40})
    player.remove(0)
    player.remove(1, 0, 80)
    return player


SCENARIO = Scenario(
    id="abort-after-defrag",
    kind="guard",
    claim="A decode that is aborted after a defragmentation leaves every sequence unchanged.",
    issue="ggml-org/llama.cpp#12695",
    run=run,
    settings=PLAIN,
)
