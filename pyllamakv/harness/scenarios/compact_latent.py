"""Latent attention keeps one compressed row per token, which is key and value, and no V."""

from __future__ import annotations

from pyllamakv.harness.scenario import CACHES, MOVERS, Scenario
from pyllamakv.harness.scenarios._compacting import stay_behind

SCENARIO = Scenario(
    id="compact-latent",
    kind="cure",
    claim="A cache without values is compacted like any other.",
    issue="ggml-org/llama.cpp#20993",
    run=stay_behind,
    model="latent",
    settings=(CACHES[0], CACHES[3], *MOVERS[:1]),
)
