"""The workload of `story` in mapped memory and in a file, selected by environment variables."""

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
    """Run the workload of `story`; a decode defragments if the patches include that."""
    lab.needs(Capability.MAPPING)
    if not lab.place.host:
        _open_on_a_device(lab)
    story.run(lab)


def _open_on_a_device(lab: Lab) -> None:
    """Fail the claim if a device without mapped memory makes the context fail."""
    try:
        lab.player().close()
    except Untestable as error:
        lab.expect(False, f"LLAMA_KV_BACKING makes the context fail: {error}")


SCENARIO = Scenario(
    id="mmap-environment",
    kind="feature",
    claim="LLAMA_KV_BACKING alone puts the cache of any program into mapped memory.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    model="test",
    settings=tuple(
        replace(setting, environment=(("LLAMA_KV_BACKING", backing),))
        for setting in (CACHES[0], CACHES[3])
        for backing in ("mmap", "/tmp")
    ),
)
