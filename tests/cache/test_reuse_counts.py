"""Test that the counts of the managers agree with those of a batcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from metrics_kit import parse

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.reuse_counts import DepthCounts
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.runtime import metrics

if TYPE_CHECKING:
    from pathlib import Path

MANAGERS = {
    "prefixes": PrefixCache,
    "prefixes in memory": lambda ctx: PrefixCache(ctx, paging="memory"),
    "slots": lambda ctx: SlotCache(ctx, size=96),
}


def test_hits_are_counted_by_depth() -> None:
    """A bound belongs to its bucket, and a miss to none."""
    counts = DepthCounts()
    for tokens in (0, 1, 64, 65, 256, 16384, 16385, 99999):
        counts.add(tokens)
    assert counts == {"64": 2, "256": 2, "1024": 0, "4096": 0, "16384": 1, "more": 2}


@pytest.mark.parametrize("memory", [MemoryType.ATTENTION, MemoryType.HYBRID])
@pytest.mark.parametrize("name", MANAGERS)
def test_reuse_counts_agree_with_the_batcher(tmp_path: Path, name: str, memory: MemoryType) -> None:
    """Prompts, reuse, evaluation, parks and resumes, during and after the run."""
    ctx = kit.context(tmp_path, {"partial": memory is MemoryType.ATTENTION}, n_ctx=96)
    object.__setattr__(ctx.info, "memory", memory)
    with MANAGERS[name](ctx) as cache, Batcher(cache) as batcher:
        going = [batcher.submit("common" * (n % 3) + "abcdef"[n] * 30, 24) for n in range(6)]
        most = 0
        while batcher.step():
            found, mine = cache.stats(), batcher.stats()
            assert found.evaluated_tokens == mine.decoded_tokens
            assert found.parks - found.resumes == mine.parked
            assert (found.parks, found.resumes) == (mine.parks, mine.resumes)
            most = max(most, mine.parked)
        found = cache.stats()
        assert most > 0
        assert found.reused_tokens == sum(one.cached or 0 for one in going)
        assert found.prompt_tokens == sum(len(one.prompt) for one in going)
        assert found.parks == found.resumes > 0
        assert found.parked_tokens >= found.resumed_tokens > 0
        assert sum(found.hits_by_depth.values()) == found.hits
        assert found.evicted_tokens > 0 or found.to_json().get("paged_out_tokens", 0) > 0
        assert found.bytes_by_tier.get("parked", 0) == 0


def test_bytes_are_counted_by_tier(tmp_path: Path) -> None:
    """Cells, pages in host memory, and pages in files; pages count their tokens."""
    for paging, tier in (("memory", "memory"), (tmp_path / "pages", "files")):
        cache = PrefixCache(kit.context(tmp_path), paging=paging)
        for first in (1, 2):
            with cache.acquire([first] * 20) as lease:
                lease.prefill()
        cache.page_out([1] * 20)
        found = cache.stats()
        assert found.bytes_by_tier["cells"] == found.resident_bytes > 0
        assert found.bytes_by_tier[tier] == found.paged_bytes > 0
        assert sum(found.bytes_by_tier.values()) == found.bytes
        assert (found.paged_out_tokens, found.paged_in_tokens) == (20, 0)
        cache.page_in([1] * 20)
        assert cache.stats().paged_in_tokens == 20
        cache.clear()
        assert (cache.stats().evicted_tokens, cache.stats().evictions) == (40, 2)
        cache.close()


def test_prometheus_has_depths_and_tiers_as_labels(tmp_path: Path) -> None:
    """A counter with the label depth, a gauge with the label tier, and the same numbers as JSON."""
    cache = PrefixCache(kit.context(tmp_path))
    for _ in range(2):
        with cache.acquire([5] * 30) as lease:
            lease.prefill()
    numbers: dict[str, Any] = {"prefix": cache.stats(), "batcher": Batcher(cache).stats()}
    kinds, samples = parse(metrics.prometheus(managers=numbers))
    labels = (("depth", "64"), ("manager", "prefix"))
    by_label = {(name, tuple(sorted(each))): value for (name, each), value in samples.items()}
    assert by_label["pyllamakv_cache_hits_by_depth_total", labels] == 1
    assert kinds["pyllamakv_cache_hits_by_depth_total"] == "counter"
    cells = (("manager", "prefix"), ("tier", "cells"))
    assert by_label["pyllamakv_cache_bytes_by_tier", cells] == cache.stats().resident_bytes
    assert kinds["pyllamakv_cache_bytes_by_tier"] == "gauge"
    for name in ("evaluated_tokens", "evicted_tokens", "paged_out_tokens", "parks", "resumes"):
        assert kinds[f"pyllamakv_cache_{name}_total"] == "counter"
    assert kinds["pyllamakv_cache_parked"] == "gauge"
    assert metrics.to_json(managers=numbers)["managers"]["prefix"]["hits_by_depth"]["64"] == 1
    assert "prefix hits by depth 64" in metrics.text(managers=numbers)


@pytest.mark.parametrize("native", [{}, {"can_shift": False}, {"partial": False}])
def test_tokens_that_a_shift_discarded_count_as_evaluated(
    tmp_path: Path, native: dict[str, Any]
) -> None:
    """A slot is filled many times, in place or by evaluating its end again."""
    cache = SlotCache(kit.context(tmp_path, native), n_slots=2, size=32, keep=4)
    with Batcher(cache) as batcher:
        going = [batcher.submit(text, 60, stop_at_end=False) for text in ("Once", "Hi")]
        while batcher.step():
            assert cache.stats().evaluated_tokens == batcher.stats().decoded_tokens
        assert all(len(one.tokens) == 60 for one in going)
        assert cache.stats().evaluated_tokens == batcher.stats().decoded_tokens
