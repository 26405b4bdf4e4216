"""A hybrid model whose attention layers have a window: two caches move, and states do not."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-hybrid-swa",
    kind="fix",
    claim="A compaction of a hybrid model with a window moves the cells of both its caches.",
    issue="ggml-org/llama.cpp#18601",
    # A saved state contains more than rows of cells.
    run=partial(defrag_sparse_tail, rows=False),
    model="hybrid-sliding",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
