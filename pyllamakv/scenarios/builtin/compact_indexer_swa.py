"""Layers alternate between a sliding window and an indexer: three caches, two with equal cells."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-indexer-swa",
    kind="fix",
    claim="A cache and its indexer cache share one plan; the sliding-window cache has its own.",
    issue="ggml-org/llama.cpp#27060",
    # A saved state contains more than rows of cells.
    run=partial(defrag_sparse_tail, rows=False),
    model="indexed-sliding",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
