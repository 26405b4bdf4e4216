"""Test the causes of decodes without a slot, and the rollback after failed decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import NoKVSlot

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


def fragment(ctx: Context) -> None:
    """Fill the cache with two alternating sequences, and remove one."""
    a, b = ctx.sequence(), ctx.sequence()
    for _ in range(ctx.info.n_ctx // 2):
        ctx.decode([a.feed([5]), b.feed([6])])
    b.remove()


def test_a_full_cache_is_called_full(tmp_path: Path) -> None:
    """Check cause, size and statistics."""
    ctx = kit.context(tmp_path, n_ctx=16)
    a = ctx.sequence()
    ctx.decode(a.feed([5] * 14))
    with pytest.raises(NoKVSlot, match="is full") as caught:
        ctx.decode(a.feed([5] * 3))
    error = caught.value
    assert (error.cause, error.n_tokens, error.stats.free, error.code) == ("full", 3, 2, 1)


def test_scattered_cells_are_called_fragmented(tmp_path: Path) -> None:
    """Check the cause, and that the hint of the message works."""
    ctx = kit.context(tmp_path, n_ctx=16)
    fragment(ctx)
    c = ctx.sequence()
    with pytest.raises(NoKVSlot, match=r"kv\.defrag\(\)") as caught:
        ctx.decode(c.feed([1, 2, 3]))
    assert caught.value.cause == "fragmented"
    assert caught.value.stats.largest_hole == 1
    ctx.kv.defrag()
    ctx.decode(c.feed([1, 2, 3]))
    assert c.tokens == [1, 2, 3]


def test_failed_step_reports_its_cause(tmp_path: Path) -> None:
    """Check the decode of a single token."""
    ctx = kit.context(tmp_path, n_ctx=8)
    a = ctx.sequence()
    ctx.decode(a.feed([5] * 8))
    with pytest.raises(NoKVSlot) as caught:
        a.step(5)
    assert (caught.value.cause, caught.value.n_tokens) == ("full", 1)
    assert len(a) == 8


def test_no_slot_with_a_sufficient_hole_has_another_cause(tmp_path: Path) -> None:
    """Check a failure in a cache that has one hole, and where slots may be scattered."""
    ctx = kit.context(tmp_path)
    ctx.native.fail_next.append(1)
    with pytest.raises(NoKVSlot, match="although there are enough") as caught:
        ctx.decode(ctx.sequence().feed([1, 2]))
    assert caught.value.cause == "other"
    scattered = kit.context(tmp_path, {"contiguous": False}, n_ctx=16)
    fragment(scattered)
    scattered.native.fail_next.append(1)
    with pytest.raises(NoKVSlot) as caught:
        scattered.decode(scattered.sequence().feed([1, 2]))
    assert caught.value.cause == "other"


def test_no_slot_error_without_cells_has_no_statistics(tmp_path: Path) -> None:
    """Check that the error is raised without statistics."""
    ctx = kit.context(tmp_path, {"capabilities": ALL & ~Capability.CELLS}, n_ctx=8)
    a = ctx.sequence()
    ctx.decode(a.feed([5] * 8))
    with pytest.raises(NoKVSlot, match="for an unknown reason") as caught:
        ctx.decode(a.feed([5, 5]))
    assert caught.value.cause == "other"
    assert caught.value.stats is None


def test_ghosts_of_a_failed_decode_are_removed(tmp_path: Path) -> None:
    """Check that cells that a library left behind are removed, and others are not."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed([5, 6]), b.feed([7, 8, 9])])
    cache = ctx.native._get(ctx.handle).cache
    decode = ctx.native.decode

    def leaving(handle, token, pos, counts, seq, logits):
        cache.put(cache.find(1), token[:1].tolist(), pos[:1].tolist(), [[int(seq[0])]])
        return 1

    ctx.native.decode = leaving
    with pytest.raises(NoKVSlot):
        ctx.decode(a.feed(np.array([1, 2, 3])))
    ctx.native.decode = decode
    assert ctx.kv.stats.used == 5
    assert (a.pos_max, b.pos_max) == (1, 2)
