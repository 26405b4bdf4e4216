"""An indexer with keys of its own picks the cells to attend to: two caches with the same cells."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-indexer",
    kind="fix",
    claim="A cache and the indexer that mirrors it move by one plan, cell for cell.",
    issue="ggml-org/llama.cpp#21149",
    # States keep more than rows.
    run=partial(defrag_sparse_tail, rows=False),
    model="indexed",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
