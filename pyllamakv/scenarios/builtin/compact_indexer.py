"""An indexer with its own keys selects the cells to attend to, so two caches have equal cells."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-indexer",
    kind="fix",
    claim="A cache and the indexer cache that mirrors it are compacted by the same plan.",
    issue="ggml-org/llama.cpp#21149",
    # A saved state contains more than rows of cells.
    run=partial(defrag_sparse_tail, rows=False),
    model="indexed",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
