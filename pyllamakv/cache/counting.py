"""Count what a cache does."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class CacheStats:
    """Count what a `ContextCache` did, and the checkpoints that it has."""

    forwards: int = 0
    decoded_tokens: int = 0
    full: int = 0
    defrags: int = 0
    copies: int = 0
    removals: int = 0
    restores: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the numbers as plain JSON values."""
        return asdict(self)
