"""Contexts with and without a threshold of their own, where a variable sets the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import Untestable
from pyllamakv.scenarios.builtin._compaction import attended
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: The value of LLAMA_KV_DEFRAG_THOLD.
DEFAULT = 0.5


def run(lab: Lab) -> None:
    """Decode in a cache of which three quarters are unnecessary, at several thresholds."""
    lab.needs(Capability.DEFRAG_OPTIONS)
    if lab.native.about.probes.get("defrag") != "compact":
        msg = "upstream's defragmentation of this release does not read LLAMA_KV_DEFRAG_THOLD"
        raise Untestable(msg)
    for parameter, effective in ((-1.0, DEFAULT), (0.0, 0.0), (0.25, 0.25), (0.875, 0.875)):
        player = lab.player(1024, n_ubatch=256, defrag_thold=parameter)
        lab.expect(
            player.info.defrag_thold == effective,
            f"defrag_thold is {parameter:g} and the variable {DEFAULT:g}: threshold "
            f"{player.info.defrag_thold:g}, expected {effective:g}",
        )
        player.fill({0: 950})
        player.fill({1: 60})
        player.remove(0)
        player.decode({1: 2})
        after = player.snapshot()
        visited = attended(after) if after is not None else []
        expected = [256 if 0.0 < effective < 0.75 else 1024]
        lab.expect(
            after is None or visited == expected,
            f"defrag_thold is {parameter:g} and the variable {DEFAULT:g}: attention visits "
            f"{visited} cells, expected {expected}",
        )
        lab.verify(player)


SCENARIO = Scenario(
    id="compact-threshold",
    kind="feature",
    claim="LLAMA_KV_DEFRAG_THOLD is the threshold of contexts that leave the default, no others.",
    issue="ggml-org/llama.cpp#20993",
    run=run,
    settings=(CACHES[0], CACHES[3]),
    environment=(("LLAMA_KV_DEFRAG_THOLD", str(DEFAULT)), ("LLAMA_KV_DEFRAG_MIN_CELLS", "512")),
)
