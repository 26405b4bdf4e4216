"""Turn replays into figures: the reuse of each policy beside LRU and the bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, get_args

from pyllamakv.cache import eviction_policy
from pyllamakv.cache.eviction_policy import EvictionPolicyName
from qa.bench.figure import Figure
from qa.replay import offline_bound
from qa.replay.policy_replay import Tick, replay
from qa.replay.replayed_request import ReplayedRequest, share_of, unique_cells

if TYPE_CHECKING:
    from qa.replay.policy_replay import ReplayResult

GROUP: Final = "Eviction"
POLICIES: Final[tuple[EvictionPolicyName, ...]] = get_args(EvictionPolicyName)
#: Capacities in percent of the unique cells.
CAPACITIES: Final = (1, 2, 5, 10, 20, 50)
#: Minimum share of the possible reuse without a limit.
TARGET: Final = 0.99
#: Minimum reuse of the default policy over that of LRU, which is nearly optimal in large caches.
LEAST: Final = 0.98
#: Those of recorded traffic by capacity: LRU loses most chats before their next turn.
LEAST_OF_TRACE: Final[Mapping[int, float]] = {1: 1.4, 2: 1.4, 5: 1.05}


def figures(
    name: str,
    requests: Sequence[ReplayedRequest],
    tokens: int,
    *,
    policies: Iterable[EvictionPolicyName] = POLICIES,
    capacities: Iterable[int] = CAPACITIES,
    least: Mapping[int, float] | None = None,
    tick: Tick = lambda: None,
) -> list[Figure]:
    """Replay requests at each capacity and without a limit; LRU is always among the policies.

    ``least`` has targets of capacities that differ from `LEAST`.
    """
    chosen = tuple(dict.fromkeys(("lru", *policies)))
    unique = unique_cells(requests)
    about = f"{len(requests):,} requests, {unique:,} unique cells of {tokens} tokens"
    found = [_unlimited(name, requests, unique, tokens, about, tick)]
    for percent in capacities:
        capacity = share_of(percent / 100, requests)
        bound = offline_bound.most_reused(requests, capacity)
        results = {policy: replay(requests, capacity, policy, tick=tick) for policy in chosen}
        target = (least or {}).get(percent, LEAST)
        found += _rows(name, percent, capacity, results, bound, target, about)
    return found


def _unlimited(
    name: str,
    requests: Sequence[ReplayedRequest],
    unique: int,
    tokens: int,
    about: str,
    tick: Tick,
) -> Figure:
    """Without a limit, nothing is evicted, so that all policies reuse the same."""
    possible = offline_bound.possible(requests)
    result = replay(requests, unique, eviction_policy.DEFAULT, tick=tick)
    share = result.reused / possible if possible else 1.0
    return Figure(
        GROUP,
        f"{name}, unlimited",
        f"{share:.2%} of the possible reuse",
        f">= {TARGET:.0%}",
        share >= TARGET and not result.evictions,
        f"{possible / result.prompts:.1%} of the prompts are possible",
        f"every policy; {about}",
        {"reused": result.reused, "possible": possible, "prompts": result.prompts},
    )


def _rows(
    name: str,
    percent: int,
    capacity: int,
    results: dict[EvictionPolicyName, ReplayResult],
    bound: int,
    target: float,
    about: str,
) -> Iterable[Figure]:
    """Yield a figure per policy; the default one has a target over LRU."""
    least = results["lru"].reused
    for policy, result in results.items():
        usual = policy == eviction_policy.DEFAULT
        over = result.reused / least if least else 1.0
        of_bound = result.reused / bound if bound else 1.0
        yield Figure(
            GROUP,
            f"{name}, {percent} %, `{policy}`" + (" (default)" if usual else ""),
            f"{over:.3f} x the reuse of LRU, {of_bound:.1%} of the bound",
            f">= {target} x LRU" if usual else "",
            over >= target if usual else None,
            "Belady's offline choice",
            about,
            {
                "capacity": capacity,
                "reused": result.reused,
                "lru": least,
                "prompts": result.prompts,
                "bound": bound,
                "evictions": result.evictions,
            },
            # A small capacity is raised to the cells of the largest request.
            table=f"{name}: {about}. Reuse as a share of the prompts.",
            row={
                "capacity": f"{percent} %",
                "cells": f"{capacity:,}",
                "policy": policy,
                "reused": f"{result.share:.2%}",
                "over LRU": f"{over:.3f}",
                "of Belady's bound": f"{of_bound:.3f}",
                "Belady's bound": f"{bound / result.prompts:.2%}",
            },
        )
