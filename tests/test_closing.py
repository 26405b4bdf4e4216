"""Test that the end of a `with` block closes the object, also after an exception."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit

import pyllamakv as kv
from pyllamakv.closing import ClosedOnExit

if TYPE_CHECKING:
    from pathlib import Path


class Door(ClosedOnExit):
    open = True

    def close(self) -> None:
        self.open = False


def test_the_end_of_the_block_closes() -> None:
    with Door() as door:
        assert door.open
    assert not door.open


def test_an_exception_closes_and_passes() -> None:
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError
    assert not door.open


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_owners_of_handles_are_not_copied(tmp_path: Path, copied) -> None:
    """A copy of a sequence would use an id that the original has freed."""
    library = kit.library()
    ctx = kit.context(tmp_path)
    model, sequence = ctx.model, ctx.sequence()
    cache = kv.PrefixCache(model.context(64, n_seq_max=4))
    batcher = kv.Batcher(cache)
    lease = cache.acquire([1, 2, 3])
    owners = [
        library, model, ctx, sequence, ctx.kv, ctx.lock, model.sampler(), cache, batcher, lease,
        batcher.submit([1], 1), kv.AsyncBatcher(cache),
        kv.ContextCache.init(model, capacity=64, max_batch=64),
    ]  # fmt: skip
    for each in owners:
        with pytest.raises(kv.ArgumentTypeError, match=f"{type(each).__name__} cannot be copied"):
            copied(each)
    sequence.step(5)
    assert copy.deepcopy(ctx.info) == ctx.info
    assert isinstance(pickle.loads(pickle.dumps(ctx.kv.snapshot())), kv.Snapshot)
