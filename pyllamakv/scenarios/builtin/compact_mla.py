"""Multi-head latent attention stores one compressed row per token and no V tensor."""

from __future__ import annotations

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-mla",
    kind="fix",
    claim="A cache without V tensors is compacted correctly.",
    issue="ggml-org/llama.cpp#20993",
    run=defrag_sparse_tail,
    model="latent",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
