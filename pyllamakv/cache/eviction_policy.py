"""Rank the nodes of a prefix tree: the node with the lowest priority is evicted first.

A policy only compares nodes. `Allocator` decides which of them may be evicted: never a node with a
lease or a pin, and never a node before its children.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, get_args

from pyllamakv.binding import arguments

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ModelInfo
    from pyllamakv.cache.radix_tree import Node

EvictionPolicyName = Literal["lru", "lfu", "lrfu", "gdsf"]

#: The policy of a cache that names none.
DEFAULT: Final[EvictionPolicyName] = "lru"

#: Half-life of a use in `RecencyAndFrequency`, in ticks of the tree's clock: a prompt has two, one
#: when it begins and one when it ends.
HALF_LIFE: Final = 128.0


class EvictionPolicy:
    """Evict the least recently used node: the base of the other policies.

    ``age`` is the highest priority of a node that was evicted.
    """

    def __init__(self) -> None:
        self.age = 0.0

    def rank(self, node: Node, clock: int, *, again: bool) -> float:
        """Return the priority of a node that was used at this time of the tree's clock.

        ``node.uses`` contains this use. ``again`` is False if only the time of a use changes, for
        example at the end of the generated text.
        """
        return float(clock)

    def evicted(self, node: Node) -> None:
        """Record that a node was chosen for eviction."""
        self.age = max(self.age, node.priority)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evict the node with the fewest uses; unused nodes age.

    LFU with dynamic ageing: the priority is the number of uses plus ``age`` at the last use
    (Arlitt, Cherkasova, Dilley, Friedrich and Jin: Evaluating Content Management Techniques for Web
    Proxy Caches, 2000).
    """

    def rank(self, node: Node, clock: int, *, again: bool) -> float:
        """Return the number of uses plus the age."""
        return self.age + node.uses


class GreedyDualSizeFrequency(EvictionPolicy):
    """Evict the node that saves the least work per cell and use; unused nodes age.

    The priority is ``age`` plus uses times cost divided by size (Cherkasova: Improving WWW Proxies
    Performance with Greedy-Dual-Size-Frequency Caching, HP Laboratories, 1998). The size is the
    number of tokens, the cost the work to evaluate them: 1 per token, and the attention to the
    tokens before it, which costs 1 at position ``span``.
    """

    def __init__(self, span: float) -> None:
        super().__init__()
        self.span = span

    def rank(self, node: Node, clock: int, *, again: bool) -> float:
        """Return uses times the mean cost of a token, plus the age."""
        middle = (node.start + node.end - 1) / 2
        return self.age + node.uses * (1 + middle / self.span)


class RecencyAndFrequency(EvictionPolicy):
    """Evict the node with the lowest sum of past uses, each of which counts half after a half-life.

    LRFU (Lee, Choi, Kim, Noh, Min, Cho and Kim: LRFU: A Spectrum of Policies that Subsumes the
    Least Recently Used and Least Frequently Used Policies, 2001) with the weighing function
    (1/2) ** (time / ``half_life``). The priority is the logarithm of the sum, times the half-life,
    plus the present time: a comparison of nodes does not depend on the time. A node with n uses is
    treated as if its last use were at most ``half_life`` times log2 n later.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        super().__init__()
        self.half_life = half_life

    def rank(self, node: Node, clock: int, *, again: bool) -> float:
        """Return the new priority from the former one."""
        if node.uses == 1:
            return float(clock)
        earlier = (node.priority - clock) / self.half_life
        if not again:
            return max(node.priority, float(clock))
        # A power of a large number would overflow, and adds nothing to its logarithm.
        more = math.log2(1 + 2**earlier) if earlier < 64 else earlier
        return clock + self.half_life * more


def checked(policy: str) -> EvictionPolicyName:
    """Return the name of a policy. Raises UsageError for an unknown one."""
    return arguments.choice("policy", policy, get_args(EvictionPolicyName))


def make(policy: EvictionPolicyName, model: ModelInfo) -> EvictionPolicy:
    """Return a policy for a cache of a model."""
    if policy == "lfu":
        return LeastFrequentlyUsed()
    if policy == "lrfu":
        return RecencyAndFrequency()
    if policy == "gdsf":
        return GreedyDualSizeFrequency(attention_span(model))
    return EvictionPolicy()


def attention_span(model: ModelInfo) -> float:
    """Return the position at which attention costs as much as the rest of a token.

    A token takes about 2 operations per parameter, and per position before it, 4 per layer and
    dimension: one multiplication and one addition each for the scores and the values.
    """
    return max(1.0, model.n_params / max(1, 2 * model.n_layer * model.n_embd))
