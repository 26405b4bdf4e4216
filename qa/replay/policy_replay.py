"""Send requests to a prefix cache, and count the cells that it reuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.cache.prefix_cache import PrefixCache
from qa.replay.counting_library import counting_context
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
    tick: Tick = lambda: None,
) -> ReplayResult:
    """Replay requests over ``capacity`` cells, one after the other. A block is a cell."""
    room = capacity + max(len(each.cells) for each in requests) + 1
    vocabulary = max(max(each.cells) for each in requests) + 1
    # Each sequence costs time. A branch is evicted for a sequence only if none is left.
    sequences = 64 + capacity // 16
    while True:
        with (
            counting_context(room, sequences, vocabulary) as context,
            PrefixCache(context, budget=capacity, policy=policy, paging=0) as cache,
        ):
            cache.branches.tree.policy.block = 1
            reused = 0
            for each in serve(cache, requests, tick):
                if each.branches == sequences:
                    break
                reused += each.cached
            else:
                prompts = sum(len(each.prompt) for each in requests)
                return ReplayResult(prompts, reused, cache.stats().evictions)
        sequences *= 2


@dataclass(frozen=True)
class ServedRequest:
    """The reused cells of a prompt, and the cells and branches that the cache has afterwards."""

    cached: int
    held: int
    branches: int


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
                lease.sequence.prefill(each.text, logits=False)
        branches = cache.branches
        yield ServedRequest(lease.cached, branches.tree.held_tokens, branches.taken)
