"""Count what a prefix cache has and did, and draw its tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.prefix_tree import Node

#: What is counted as it happens.
COUNTED = (
    *("hits", "misses", "reused", "asked"),
    *("evicted", "paged_out", "paged_in", "damaged"),
)


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Hold the numbers of a prefix cache.

    ``resident`` branches have a sequence, ``paged`` pages lie outside of the cache, ``leased``
    sequences are in use. ``tokens`` are in the tree, ``cells`` of them in the cache, each once.
    ``reused`` of the ``asked`` tokens of all prompts were known. ``evicted`` branches were dropped,
    ``damaged`` pages could not be read back.
    """

    resident: int
    paged: int
    leased: int
    pinned: int
    nodes: int
    tokens: int
    cells: int
    resident_bytes: int
    paged_bytes: int
    bytes: int
    budget: int | None
    hits: int
    misses: int
    reused: int
    asked: int
    evicted: int
    paged_out: int
    paged_in: int
    damaged: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


def measure(cache: PrefixCache) -> PrefixStats:
    """Count what a cache has."""
    branches = cache.branches
    tree = branches.tree
    resident, paged = branches.resident_bytes, branches.paged_bytes
    return PrefixStats(
        resident=branches.taken - len(cache.leases),
        paged=branches.pager.count if branches.pager is not None else 0,
        leased=len(cache.leases),
        pinned=len(cache.pins),
        nodes=tree.nodes,
        tokens=tree.tokens,
        cells=tree.held_tokens if branches.sharing else sum(map(len, branches.sequences())),
        resident_bytes=resident,
        paged_bytes=paged,
        bytes=resident + paged,
        budget=cache.budget,
        **cache.counts,
    )


def draw(cache: PrefixCache) -> str:
    """Draw the tree: positions, what holds each node, when it was last used."""
    lines = [repr(cache.stats())]
    waiting: list[tuple[Node, int]] = [(cache.branches.tree.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if node.parent is not None:
            lines.append("  " * depth + " ".join(_facts(node)))
        children = sorted(node.children.items(), reverse=True)
        waiting += [(child, depth + 1) for _, child in children]
    return "\n".join(lines)


def _facts(node: Node) -> list[str]:
    facts = [f"{node.start}..{node.end}"]
    if node.entry is not None:
        facts.append(f"sequence {node.entry.id}")
    facts += [f"leased {lease.sequence.id}" for lease in node.leases]
    if node.page is not None:
        facts.append(f"page {node.page.start}..{node.page.end}")
    facts += [f"pinned {name}" for name in sorted(node.pins)]
    return [*facts, f"used {node.used}"]
