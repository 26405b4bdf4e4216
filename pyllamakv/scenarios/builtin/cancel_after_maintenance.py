"""A cancel ends a decode after a defragmentation, a shift, a restore and a clear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.abort_decode import abort, count_abort_polls
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Run each maintenance operation, and abort the next decode."""
    polls = count_abort_polls(lab.player(256, n_ubatch=32), {0: 64})
    for operation in _operations(lab):
        player = lab.player(256, n_ubatch=32)
        player.fill({0: 48, 1: 48, 2: 48}, interleave=True)
        player.remove(1)
        operation(player)
        with player.unchanged(f"the decode aborted after {operation.__name__.strip('_')}"):
            abort(lab, player, {3: 64}, polls // 2, polls)
        player.decode({3: 64})
        lab.verify(player)


def _operations(lab: Lab) -> list[Callable[[Player], object]]:
    found: list[Callable[[Player], object]] = [_restore, _clear]
    if lab.player(256).info.can_shift:
        found.append(_shift)
    if lab.native.about.capabilities & Capability.DEFRAG:
        found += [_defragmentation, _defragmentation_in_a_decode]
    return found


def _defragmentation(player: Player) -> None:
    player.defrag()


def _defragmentation_in_a_decode(player: Player) -> None:
    player.decode({4: 40})
    player.remove(4)


def _shift(player: Player) -> None:
    player.shift(2, 0, -1, 5)
    player.update()


def _restore(player: Player) -> None:
    player.save(2, "saved")
    player.remove(2)
    player.restore(2, "saved")


def _clear(player: Player) -> None:
    player.clear()
    player.fill({0: 48})


SCENARIO = Scenario(
    id="cancel-after-maintenance",
    kind="guard",
    claim="A decode can be aborted after every operation that maintains the cache.",
    issue="ggml-org/llama.cpp#10571",
    run=run,
    settings=PLAIN,
)
