"""Compare samplers, grammars and log-probabilities with the same in C, on one library and model.

As in `loop`, both sides must produce the same tokens, and the clock is the CPU time of the thread.
"""

from __future__ import annotations

from dataclasses import replace

from qa.bench import loop
from qa.bench.decode_loops import ours, plain
from qa.bench.figure import Figure
from qa.bench.workload import Workload

GROUP = "Sampling"

WORKLOADS = (
    Workload("penalties, top-k, top-p, temperature and a seed", "chained", 1, 256, ()),
    Workload("a grammar", "grammar", 1, 256, ()),
    Workload("log-probabilities of 5 tokens", "logprobs", 1, 256, ()),
)


def figures(tick: loop.Tick, spec: str = "0.3.9+patched", pairs: int = loop.PAIRS) -> list[Figure]:
    """Measure every workload against C."""
    variant, model = loop.built(spec), loop.model_file()
    found = []
    for work in WORKLOADS:
        with ours(variant, model, work) as mine:
            measured = loop.measure(plain(variant, model, work), mine, work, pairs, tick)
        found.append(replace(loop.beside_c(work, model, measured), group=GROUP))
    return found
