"""Keys and values of different quantized types are moved, each with its own row size.

The issue reports a device that could not copy between quantized rows. Through 0.3.8, the CPU copied
too many bytes instead. This scenario also detects a mover that uses one row size for both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyllamakv.scenarios.scenario import Scenario, Setting

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

FLASH = tuple(
    Setting(True, key, value)
    for key, value in (("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_1", "q5_0"), ("f16", "q4_1"))
)


def run(lab: Lab) -> None:
    """Share a cache among three sequences, remove the second one, and defragment twice."""
    player = lab.player(256, n_ubatch=32)
    player.fill({0: 48, 1: 48, 2: 48}, interleave=True)
    player.remove(1)
    lab.picture(player, "before")
    with player.unchanged():
        player.defrag()
    player.fill({3: 24})
    player.remove(0, 0, 30)
    with player.unchanged():
        player.defrag()
    lab.picture(player, "after")
    lab.verify(player)


SCENARIO = Scenario(
    id="mixed-types",
    kind="fix",
    claim="Keys and values of different quantized types survive a defragmentation.",
    issue="ggml-org/llama.cpp#9314",
    run=run,
    model="grouped",
    settings=(*FLASH, replace(FLASH[0], environment=(("LLAMA_KV_DEFRAG_MOVER", "graph"),))),
)
