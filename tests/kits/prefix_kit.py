"""Create prefix caches over a simulated library, and serve prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import runtime_kit as kit

from pyllamakv.cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.cache.lease import PrefixLease


SYSTEM = [10 + i % 40 for i in range(20)]


def make(folder: Path, **options: Any) -> PrefixCache:
    """Create a cache; context options are passed to the context."""
    names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "native")
    context = {name: options.pop(name) for name in names if name in options}
    return PrefixCache(kit.context(folder, **{"n_ctx": 128, **context}), **options)


def used(cache: PrefixCache) -> int:
    """Count the used cells."""
    return cache.context.kv.stats.used


def leaves(cache: PrefixCache) -> set[bytes]:
    """Return the tokens of every branch, leased ones as far as they are decoded."""
    cache.sync()
    return {node.key for node in cache.branches.tree.walk() if not node.children}


def feed(lease: PrefixLease, tokens: list[int] | None = None) -> PrefixLease:
    """Decode the rest of a lease's prompt, and more tokens after it."""
    lease.prefill()
    if tokens:
        lease.sequence.prefill(tokens)
    return lease


def serve(cache: PrefixCache, prompt: list[int], answer: list[int] | None = None) -> int:
    """Serve one prompt with a given answer, and return how much of it was cached."""
    with cache.acquire(prompt) as lease:
        if answer:
            lease.make_room(len(answer))
        feed(lease, answer)
    cache.check()
    return lease.cached
