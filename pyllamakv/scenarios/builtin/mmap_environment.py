"""All that a story goes through, in mapped memory and in a file, as the environment chooses it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import Untestable
from pyllamakv.scenarios.builtin import story
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Tell the story of `story`; a decode defragments where that scenario's patch does."""
    lab.needs(Capability.MAPPING)
    if not lab.place.host:
        _open_on_a_device(lab)
    story.run(lab)


def _open_on_a_device(lab: Lab) -> None:
    """Break the claim where what no device can have costs a program its context."""
    try:
        lab.player().close()
    except Untestable as error:
        lab.expect(False, f"what the environment asks for is refused: {error}")


SCENARIO = Scenario(
    id="mmap-environment",
    kind="feature",
    claim="A program that knows nothing of mapped memory gets it by LLAMA_KV_BACKING alone.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    model="test",
    settings=tuple(
        replace(setting, environment=(("LLAMA_KV_BACKING", backing),))
        for setting in (CACHES[0], CACHES[3])
        for backing in ("mmap", "/tmp")
    ),
)
