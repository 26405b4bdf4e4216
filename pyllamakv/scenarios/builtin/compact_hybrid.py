"""Half of a hybrid model's layers keep a state, the others cells: only cells can be moved."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-hybrid",
    kind="fix",
    claim="The attention half of a hybrid model is compacted, its states stay as they are.",
    issue="ggml-org/llama.cpp#21831",
    # States keep more than rows.
    run=partial(defrag_sparse_tail, rows=False),
    model="hybrid",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
