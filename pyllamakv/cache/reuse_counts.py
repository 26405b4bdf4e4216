"""Count the hits of a cache manager by their depth."""

from __future__ import annotations

#: Upper bounds of the depths of hits, in tokens.
DEPTHS = (64, 256, 1024, 4096, 16384)


class DepthCounts(dict[str, int]):
    """Number of prompts by the number of their tokens that were cached.

    A key is the smallest of `DEPTHS` that is not exceeded, or "more". Misses are not counted.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((*map(str, DEPTHS), "more"), 0))

    def add(self, tokens: int) -> None:
        """Count a prompt with this number of cached tokens."""
        if tokens > 0:
            self[next((str(most) for most in DEPTHS if tokens <= most), "more")] += 1
