"""A hybrid model has cells for attention and states for recurrence. Only cells can move."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-hybrid",
    kind="fix",
    claim=(
        "A compaction of a hybrid model moves its attention cells and leaves its states unchanged."
    ),
    issue="ggml-org/llama.cpp#21831",
    # A saved state contains more than rows of cells.
    run=partial(defrag_sparse_tail, rows=False),
    model="hybrid",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
