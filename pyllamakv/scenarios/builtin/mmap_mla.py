"""Multi-head latent attention in mapped memory: later releases have no V tensors to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.builtin._mapped_memory import mapped
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player


def run(lab: Lab) -> None:
    """Copy, cut, shift and trim, in one stream and in a stream per sequence."""
    _exercise(lab, mapped(lab, 1024, n_seq_max=4))
    if lab.native.about.capabilities & Capability.KV_UNIFIED:
        _exercise(lab, mapped(lab, 1024, n_seq_max=4, kv_unified=False))


def _exercise(lab: Lab, player: Player) -> None:
    player.fill({0: 120, 1: 60})
    player.copy(0, 2)
    player.update()
    player.decode({0: 2, 1: 2, 2: 2})
    lab.verify(player)
    player.remove(1, 0, 20)
    if player.info.can_shift:
        player.shift(1, 20, -1, -20)
        player.update()
    player.remove(0)
    player.native.mapping_trim(player.context)
    player.decode({1: 4, 2: 4})
    lab.verify(player)


SCENARIO = Scenario(
    id="mmap-mla",
    kind="feature",
    claim="Latent rows in mapped memory are copied, shifted and trimmed, without a V tensor.",
    issue="ggml-org/llama.cpp#12801",
    run=run,
    model="latent",
    settings=(CACHES[0], CACHES[1], CACHES[3]),
    environment=(),
)
