"""A copy between two streams copies used cells only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import Untestable
from pyllamakv.scenarios.builtin._mapped_memory import (
    expect_committed_below,
    mapped,
    max_committed,
    must_shift,
)
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Copy a sequence, remove its source, shift the copy, and trim the cache."""
    lab.needs(Capability.MAPPING)
    if not lab.native.about.capabilities & Capability.KV_UNIFIED:
        msg = "this release has only one stream"
        raise Untestable(msg)
    player = mapped(lab, 32768, n_batch=512, n_ubatch=64, n_seq_max=4, kv_unified=False)
    must_shift(player)
    player.fill({0: 300, 1: 100})
    player.copy(0, 2)
    # A copy of the copy, whose source is removed before either copy was made.
    player.copy(2, 3)
    player.remove(2)
    player.update()
    expect_committed_below(lab, player, 300 + 256, "after two copies")
    player.remove(0)
    player.shift(3, 0, -1, 10)
    player.update()
    player.native.mapping_trim(player.context)
    lab.note(enough=max_committed(player, 300))
    expect_committed_below(lab, player, 300 + 256, "after trimming")
    player.decode({1: 8, 3: 8})
    lab.verify(player)


SCENARIO = Scenario(
    id="mmap-streams",
    kind="feature",
    claim="A copy between streams commits no pages of unused cells.",
    issue="ggml-org/llama.cpp#14363",
    run=run,
    # The last one is a quick setting: rows of K and V have different sizes.
    settings=(CACHES[0], CACHES[3], CACHES[4], replace(CACHES[4], type_k="f16")),
    environment=(),
)
