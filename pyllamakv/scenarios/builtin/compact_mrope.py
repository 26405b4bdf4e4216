"""With M-RoPE, a position may include row and column of an image. Cells and states store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import Unsupported
from pyllamakv.scenarios.builtin._compaction import defrag, defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab


def run(lab: Lab) -> None:
    """Compact, and continue an image.

    A cell is masked if it has the position of the decoded embedding and follows it in the image.
    Therefore the lower rows are decoded first, and lost rows and columns change the logits. They
    are in the saved state as well, except in the first releases with such cells.
    """
    if lab.native.about.probes.get("defrag") != "compact":
        # The first releases with such models read text batches out of bounds.
        msg = "this library does not support compaction"
        raise Unsupported(msg, capability="defrag")
    defrag_sparse_tail(lab, rows=False)
    player = lab.player(256)
    player.fill({0: 100})
    player.fill({1: 8})
    pos = player.ledger.next(1)
    player.decode_image(1, (4, 5), 8, pos=pos)
    player.remove(0)
    before = player.native.state_save(player.context, 1)
    defrag(lab, player, rows=False)
    after = player.native.state_save(player.context, 1)
    lab.expect(before == after, "the saved state of a sequence changed when its cells moved")
    if _continues(lab):
        player.decode_image(1, (2, 3), 8, pos=pos)
        lab.verify(player)
        player.decode_image(1, (0, 1), 8, pos=pos)
    player.fill({1: 20})
    lab.verify(player)


def _continues(lab: Lab) -> bool:
    """Return whether the release decodes an image in several batches (not in November 2025)."""
    player = lab.player(256)
    player.fill({1: 8})
    pos = player.ledger.next(1)
    player.decode_image(1, (4, 5), 8, pos=pos)
    return player.decode_image(1, (2, 3), 8, pos=pos, expect=None) == DecodeStatus.OK


SCENARIO = Scenario(
    id="compact-mrope",
    kind="fix",
    claim="The M-RoPE positions of a cell move with it.",
    issue="ggml-org/llama.cpp#20993",
    run=run,
    model="places",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
