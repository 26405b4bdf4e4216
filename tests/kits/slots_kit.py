"""Helpers for tests of slots: fill a slot, and decode the same tokens in a separate context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import runtime_kit as kit

from pyllamakv.cache.slot_cache import SlotCache

if TYPE_CHECKING:
    from pathlib import Path


def fill(cache: SlotCache, tokens: Any) -> int:
    """Decode a prompt in a slot, release it, and return the id of its sequence."""
    with cache.acquire(tokens) as lease:
        lease.decode()
        return lease.sequence.id


def fresh(tmp_path: Path, tokens: list[int]) -> np.ndarray:
    """Return the logits after these tokens in a separate context."""
    alone = kit.context(tmp_path)
    sequence = alone.sequence()
    sequence.prefill(tokens)
    return alone.logits().copy()
