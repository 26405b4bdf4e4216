"""Test that the library without computation leads to the decisions of a real one."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache.eviction_policy import EvictionPolicyName
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import Unsupported
from pyllamakv.scenarios import synthetic_models
from qa.replay import agent_workload, offline_bound, policy_replay
from qa.replay.agent_workload import AgentTraffic
from qa.replay.counting_library import counting_context
from qa.replay.replayed_request import ReplayedRequest, share_of

#: Short enough for a context of 2,048 cells, with token ids of a small model.
SMALL = AgentTraffic(agents=6, parallel=4, kinds=2, system=(6, 9), turns=(2, 4), result=(1, 4))


def requests() -> list[ReplayedRequest]:
    """Return generated requests with numbers below 64 instead of unique ones."""
    return [
        ReplayedRequest(
            tuple(1 + n % 61 for n in each.prompt), tuple(1 + n % 61 for n in each.text)
        )
        for each in agent_workload.generate(SMALL)
    ]


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_a_real_library_leads_to_the_same_decisions(policy: EvictionPolicyName) -> None:
    """Every request reuses the same cells, and leaves the same number in the cache."""
    many = requests()
    capacity = share_of(0.3, many)
    with (
        counting_context(4096, 48, 64) as ctx,
        PrefixCache(ctx, budget=capacity, policy=policy) as cache,
    ):
        counted = list(policy_replay.serve(cache, many))
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=2048, n_batch=64, n_seq_max=48) as ctx,
    ):
        with PrefixCache(ctx) as cache:
            size = cache.branches.bytes_of(1)
        with PrefixCache(ctx, budget=capacity * size, policy=policy) as cache:
            real = list(policy_replay.serve(cache, many))
            cache.check()
    assert real == counted
    assert max(each.held for each in real) <= capacity
    assert sum(each.cached for each in real) > 0


def test_the_cache_never_exceeds_its_capacity() -> None:
    """It does not while a request is served either."""
    many = requests()
    capacity = share_of(0.1, many)
    result = policy_replay.replay(many, capacity, "lru")
    assert result.prompts == sum(len(each.prompt) for each in many)
    assert 0 < result.share < 1
    assert result.evictions > 0


def test_replayed_cache_uses_the_named_policy() -> None:
    """A frequent prompt is kept over prompts used once, unless the oldest one is evicted."""
    often = [ReplayedRequest((1, 1, 1, 1))] * 5
    scan = [ReplayedRequest((n, n, n, n)) for n in range(10, 14)]
    reused = {
        name: policy_replay.replay([*often, *scan, *often[:1]], 8, name).reused
        for name in ("lru", "adaptive")
    }
    assert reused == {"lru": 12, "adaptive": 15}


def test_sequences_never_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay with too few of them is repeated with more: the budget is the only limit."""
    many = [ReplayedRequest((1 + n % 60, 1 + n // 60)) for n in range(200)] * 2
    asked: list[int] = []

    def opened(cells: int, sequences: int, *rest: Any) -> Any:
        asked.append(sequences)
        return counting_context(cells, sequences, *rest)

    monkeypatch.setattr(policy_replay, "counting_context", opened)
    result = policy_replay.replay(many, 460, "lru")
    assert (result.reused, result.evictions) == (offline_bound.possible(many), 0)
    assert asked == [92, 184, 368]


def test_cell_statistics_after_a_decode_are_unsupported() -> None:
    """A manager that needs them fails, and gets no wrong values."""
    with counting_context(64, 4, 64) as ctx:
        assert ctx.kv.stats.size == 64
        ctx.sequence().prefill([1, 2, 3])
        with pytest.raises(Unsupported):
            _ = ctx.kv.stats
