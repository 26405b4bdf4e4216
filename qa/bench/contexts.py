"""Open the caches of one shape at a time and measure fragmentation patterns in them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyllamakv
from pyllamakv.home import home
from pyllamakv.runtime.memory_estimate import available_bytes
from pyllamakv.scenarios import synthetic_models
from qa.bench import c_library, defrag_workloads
from qa.bench.defrag_workloads import CacheShape
from qa.bench.memory_bandwidth import MemoryBandwidth
from qa.bench.rounds import PUBLISHED, DefragBenchmark, Measured

Tick = Callable[[], None]


def model(shape: str) -> Path:
    """Return the model file of a workload's shape."""
    return synthetic_models.generate(defrag_workloads.SHAPES[shape], home() / "models")


def context(loaded: pyllamakv.Model, cache: CacheShape, **options: Any) -> pyllamakv.Context:
    """Create the context of a cache: one thread, and batches that keep the other buffers small.

    ``options`` are further arguments of `Model.context`.
    """
    return loaded.context(
        n_ctx=cache.cells,
        n_batch=32,
        n_ubatch=32,
        n_seq_max=2,
        n_threads=1,
        flash_attn=cache.setting.flash_attn,
        type_k=cache.setting.kind,
        type_v=cache.setting.kind,
        **options,
    )


def measure(
    plan: Iterable[tuple[CacheShape, tuple[str, ...]]], tick: Tick, *, spec: str, budget: float
) -> list[Measured]:
    """Measure patterns in caches, one cache shape at a time; skip those that exceed the memory.

    ``budget`` is the time in seconds for the published algorithm in one pattern of one cache.
    """
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder, ExitStack() as stack:
        limits = c_library.load("limits.c", Path(folder))
        library = stack.enter_context(pyllamakv.open(spec))
        models: dict[str, pyllamakv.Model] = {}
        for cache, patterns in plan:
            reason = cache.skipped(available_bytes())
            if reason:
                found += [Measured(cache, pattern, reason) for pattern in patterns]
                continue
            if cache.shape not in models:
                models[cache.shape] = stack.enter_context(library.load_model(model(cache.shape)))
            with (
                context(models[cache.shape], cache) as made,
                context(models[cache.shape], cache, defrag_mover=PUBLISHED) as published,
                MemoryBandwidth(limits, cache) as block,
            ):
                stand = DefragBenchmark(cache, made, published, block, budget=budget, tick=tick)
                found += [stand.measure(pattern) for pattern in patterns]
    return found
