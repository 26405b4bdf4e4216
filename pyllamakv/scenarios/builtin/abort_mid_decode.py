"""A decode is aborted at several points. Other sequences keep all tokens, and no cell leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios.abort_decode import abort, count_abort_polls
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Abort a batch of four micro-batches near its start, its middle and its end."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 40, 1: 40}, interleave=True)
    polls = count_abort_polls(player, {2: 128})
    for quarter in (0, 1, 2, 3):
        with player.unchanged("the aborted decode"):
            abort(lab, player, {2: 128}, max(1, polls * (2 * quarter + 1) // 8), polls)
        lab.verify(player)
    player.decode({2: 128})
    lab.verify(player)


SCENARIO = Scenario(
    id="abort-mid-decode",
    kind="guard",
    claim="An aborted decode removes no tokens of other sequences and leaves no stray cells.",
    issue="ggml-org/llama.cpp#9525",
    run=run,
    settings=PLAIN,
)
