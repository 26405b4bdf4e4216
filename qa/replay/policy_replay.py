"""Send requests to a prefix cache, and count the cells that it reuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.cache.prefix_cache import PrefixCache
from qa.replay.counting_library import SPAN, counting_context
from qa.replay.replayed_request import ReplayedRequest

if TYPE_CHECKING:
    from pyllamakv.cache.eviction_policy import EvictionPolicyName

Tick = Callable[[], None]


@dataclass(frozen=True)
class ReplayResult:
    """The totals of a replay: cells of prompts, reused ones, and evicted branches."""

    prompts: int
    reused: int
    evictions: int

    @property
    def share(self) -> float:
        """Return the reused share of the prompts."""
        return self.reused / self.prompts


def replay(
    requests: Sequence[ReplayedRequest],
    capacity: int,
    policy: EvictionPolicyName,
    *,
    tokens: int,
    tick: Tick = lambda: None,
) -> ReplayResult:
    """Replay requests over ``capacity`` cells of ``tokens`` tokens each, one after the other."""
    room = capacity + max(len(each.cells) for each in requests) + 1
    vocabulary = max(max(each.cells) for each in requests) + 1
    # A branch has at least one cell.
    sequences = min(len(requests), room) + 1
    with (
        counting_context(room, sequences, vocabulary, SPAN / tokens) as context,
        PrefixCache(context, budget=capacity, policy=policy) as cache,
    ):
        reused = [each.cached for each in serve(cache, requests, tick)]
        evictions = cache.stats().evictions
    return ReplayResult(sum(len(each.prompt) for each in requests), sum(reused), evictions)


@dataclass(frozen=True)
class ServedRequest:
    """The cells of a prompt that were reused, and those that are in the cache afterwards."""

    cached: int
    held: int


def serve(
    cache: PrefixCache, requests: Iterable[ReplayedRequest], tick: Tick = lambda: None
) -> Iterable[ServedRequest]:
    """Serve requests one after the other, and yield what each reused."""
    for each in requests:
        tick()
        with cache.acquire(each.prompt) as lease:
            lease.prefill(logits=False)
            if each.text:
                lease.make_room(len(each.text))
                cache.context.prefill(lease.sequence, each.text, logits=False)
        yield ServedRequest(lease.cached, cache.branches.tree.held_tokens)
