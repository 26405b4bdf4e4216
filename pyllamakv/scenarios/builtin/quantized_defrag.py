"""A defragmentation copies quantized rows and no bytes beyond them.

Through 0.3.8, the CPU's copy between two quantized rows of one type wrote 32 times too many bytes,
over the next cells and past the end of the buffer. Output was garbage until the server was
restarted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: `ContextParams.defrag_mover`: one copy per move, in graphs, as upstream defragments.
GRAPH = 3


def run(lab: Lab) -> None:
    """Decode in two sequences alternately, remove half of the second, defragment, and decode."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 80, 1: 80}, interleave=True)
    player.remove(1, 0, 40)
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    lab.picture(player, "after")
    player.decode({0: 4, 1: 4})
    lab.verify(player)
    _long_run(lab)


def _long_run(lab: Lab) -> None:
    """Move 33 adjacent cells by one copy in a graph, which two threads divide among them."""
    chosen = GRAPH if lab.native.about.capabilities & Capability.DEFRAG_OPTIONS else 0
    player = lab.player(256, defrag_mover=chosen, n_threads=2, n_threads_batch=2)
    player.fill({0: 33})
    player.fill({1: 63})
    player.remove(0)
    with player.unchanged():
        player.defrag()
    lab.verify(player)


SCENARIO = Scenario(
    id="quantized-defrag",
    kind="fix",
    claim="A defragmentation moves quantized keys and values byte for byte.",
    issue="ggml-org/llama.cpp#12253",
    run=run,
    settings=(CACHES[1], CACHES[2], CACHES[4], CACHES[5], MOVERS[1]),
)
