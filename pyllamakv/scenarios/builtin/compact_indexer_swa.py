"""Every other layer has a window, the others an indexer: three caches, of which two are alike."""

from __future__ import annotations

from functools import partial

from pyllamakv.scenarios.builtin._compaction import defrag_sparse_tail
from pyllamakv.scenarios.scenario import CACHES, MOVERS, Scenario

SCENARIO = Scenario(
    id="compact-indexer-swa",
    kind="fix",
    claim="A cache and its indexer's move by one plan, and that of the windows by its own.",
    issue="ggml-org/llama.cpp#27060",
    # States keep more than rows.
    run=partial(defrag_sparse_tail, rows=False),
    model="indexed-sliding",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
