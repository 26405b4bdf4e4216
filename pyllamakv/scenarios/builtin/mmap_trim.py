"""Pages of removed sequences are returned to the system. The remaining cells are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.scenarios.builtin._mapped_memory import committed, expect_committed_below, mapped
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Fill half of a cache, remove most of it, defragment, trim and decode, twice."""
    lab.needs(Capability.CELLS)
    player = mapped(lab, 8192, n_batch=512, n_ubatch=128)
    for _ in range(2):
        player.fill({0: 2000})
        player.fill({1: 50, 2: 50}, interleave=True)
        player.fill({3: 2000})
        full = committed(player)
        player.remove(0)
        player.remove(2)
        player.remove(3, 100)
        if lab.native.about.capabilities & Capability.DEFRAG:
            with player.unchanged():
                player.defrag()
        with player.unchanged("trimming"):
            back = player.native.mapping_trim(player.context)
        lab.expect(
            committed(player) == full - back,
            f"{full} bytes were resident, {back} reported as trimmed, but {committed(player)} are "
            f"resident",
        )
        snapshot = player.snapshot()
        assert snapshot is not None  # lab.needs
        expect_committed_below(lab, player, snapshot.stats.used_max_p1, "after trimming")
        player.check_cells()
        again = player.native.mapping_trim(player.context)
        lab.expect(again == 0, f"a second trim without changes in between returned {again} bytes")
        # Trimmed pages are written again, between and after the remaining cells.
        player.decode({1: 60, 3: 60})
        lab.verify(player)
        player.remove(1)
        player.remove(3)


SCENARIO = Scenario(
    id="mmap-trim",
    kind="feature",
    claim="Trimming returns the memory above the last used cell and keeps all used cells.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    settings=CACHES,
)
