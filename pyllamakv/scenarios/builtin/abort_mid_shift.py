"""A decode is aborted while it applies a shift. The keys must not stay partly rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.abort_decode import abort, count_abort_polls
from pyllamakv.scenarios.scenario import CACHES, PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Abort at early polls, when the shift is applied before any token is decoded."""
    reference = _shifted(lab)
    polls = count_abort_polls(reference, {2: 8})
    for at in (1, 2, 3, 12, 40):
        player = _shifted(lab)
        abort(lab, player, {2: 8}, at, polls)
        lab.verify(player)
        player.decode({2: 8})
        lab.verify(player)


def _shifted(lab: Lab) -> Player:
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 64, 1: 32})
    player.remove(0, 8, 24)
    player.shift(0, 24, -1, -16)
    return player


SCENARIO = Scenario(
    id="abort-mid-shift",
    kind="fix",
    claim="After an aborted decode, a shift is either applied completely or still pending.",
    issue="ggml-org/llama.cpp#9525",
    run=run,
    model="deep",
    # Quick runs use the last one, which every release can shift.
    settings=(*PLAIN, CACHES[3]),
)
