"""Test that logits are read in place, and never after they are stale."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit

from pyllamakv.errors import Closed, StaleLogits, UsageError

if TYPE_CHECKING:
    from pathlib import Path

READS = [
    lambda x: x[0],
    lambda x: x[:5],
    lambda x: x.argmax(),
    lambda x: x.copy(),
    lambda x: x.top(3),
    lambda x: x + 1,
    lambda x: np.exp(x),
    lambda x: np.asarray(x),
    lambda x: np.max(x),
    lambda x: list(x),
    lambda x: x == x,
    lambda x: x.max(),
    lambda x: x.astype(np.float64),
    lambda x: x.tolist(),
    lambda x: x.ndim,
    lambda x: copy.deepcopy(x),
]


@pytest.mark.parametrize("read", READS)
def test_every_read_is_refused_after_a_later_decode(tmp_path: Path, read) -> None:
    """Check each way of reading, before and after."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed([1, 2, 3]))
    logits = ctx.logits()
    kept, before = logits.copy(), read(logits)
    assert not logits.stale
    a.step(4)
    assert logits.stale
    with pytest.raises(StaleLogits):
        read(logits)
    assert kept.shape == (ctx.n_vocab,)
    assert np.array_equal(
        np.asarray(before), np.asarray(read(kept)) if read is not READS[4] else before
    )


def test_failed_decode_makes_logits_stale(tmp_path: Path) -> None:
    """Check a decode that found no cells."""
    ctx = kit.context(tmp_path, n_ctx=8, n_batch=8)
    a = ctx.sequence()
    ctx.decode(a.feed([1] * 8))
    logits = ctx.logits()
    assert ctx.try_decode(a.feed([1])) == 1
    with pytest.raises(StaleLogits):
        logits.argmax()
    with pytest.raises(StaleLogits, match="last decode failed"):
        ctx.logits()


def test_logits_of_a_closed_context_are_stale(tmp_path: Path) -> None:
    """Check that closing makes them unreadable as well."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    logits = ctx.logits()
    ctx.close()
    assert logits.stale
    with pytest.raises(Closed):
        logits.copy()


CHANGES = [
    lambda x: operator.iadd(x, 1),
    lambda x: np.exp(x, out=x),
    lambda x: np.add.at(x, 0, 1),
    lambda x: np.clip(x, 0, 1, out=x),
    lambda x: np.put(x, 0, 1),
    lambda x: operator.setitem(x, 0, 1),
    lambda x: x.sort(),
    lambda x: x.fill(0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_names_the_copy(tmp_path: Path, change) -> None:
    """A write into the memory of the library would change the logits that C samples from."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    for view in (ctx.logits(), ctx.logits_all()):
        before = view.copy()
        with pytest.raises(UsageError, match=r"read-only.*np\.array\(logits\)"):
            change(view)
        assert hasattr(view, "sort")
        assert callable(getattr(view, "put", None))
        assert np.array_equal(view, before)


def test_slices_of_logits_are_copies(tmp_path: Path) -> None:
    """A slice is a new array, and a result that is a view of its array is read-only."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    logits = ctx.logits()
    part = logits[:3]
    part[:] = 7
    assert logits[0] == 0
    memory = logits._values
    for found in (logits.T, logits.reshape(-1, 1), logits.astype(np.float32, copy=False), part):
        assert not np.shares_memory(found, memory)
    with pytest.raises(ValueError, match="only be copied"):
        np.asarray(logits, copy=False) if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else (
            logits.__array__(copy=False)
        )


ARRAY = [
    lambda x: x.max(axis=-1), lambda x: x.sum(), lambda x: x.mean(), lambda x: x.std(),
    lambda x: x.ndim, lambda x: x.size, lambda x: x.shape, lambda x: x.tolist(),
    lambda x: x.astype(np.float16), lambda x: x.argmax(), lambda x: x.argmax(axis=-1),
    lambda x: np.argmax(x), lambda x: np.argmax(x, axis=-1), lambda x: x.argsort(),
    lambda x: np.sort(x), lambda x: np.exp(x), lambda x: np.logaddexp.reduce(x, axis=-1),
    lambda x: np.where(x > 1, x, 0), lambda x: x.T, lambda x: np.float32(2) * x, lambda x: -x,
    lambda x: np.array(x), lambda x: copy.copy(x), lambda x: pickle.loads(pickle.dumps(x)),
]  # fmt: skip


@pytest.mark.parametrize("read", ARRAY)
def test_logits_behave_as_a_numpy_array(tmp_path: Path, read) -> None:
    """One row and all rows have the same values and types as an array of numpy."""
    ctx = kit.context(tmp_path)
    ctx.decode(ctx.sequence().feed([1, 2, 3], logits="all"))
    for view in (ctx.logits(), ctx.logits_all()):
        found, expected = read(view), read(np.array(view))
        assert np.array_equal(found, expected)
        assert np.asarray(found).dtype == np.asarray(expected).dtype
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ctx.logits().nothing


def test_places_without_logits_are_refused(tmp_path: Path) -> None:
    """Check indexes of a batch with some logits, and negative indexes."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    with pytest.raises(StaleLogits, match="no decode yet"):
        ctx.logits()
    ctx.decode([a.feed([1, 2]), b.feed([3, 4], logits="all")])
    assert ctx.logits(1).argmax() == a.logits().argmax()
    assert ctx.logits(-1).argmax() == ctx.logits(3).argmax() == b.logits().argmax()
    assert ctx.logits(-3).argmax() == ctx.logits(1).argmax()
    for wrong in (0, 4, -4, 99):
        with pytest.raises(UsageError, match="has no logits"):
            ctx.logits(wrong)
    a.step(5)
    assert len(ctx.logits(0)) == ctx.n_vocab
    with pytest.raises(UsageError):
        ctx.logits(1)
    with pytest.raises(StaleLogits, match="this sequence"):
        b.logits()
    assert "stale" not in repr(a.logits())


def test_top_tokens_are_ordered_best_first(tmp_path: Path) -> None:
    """Check the order of `top`."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    logits = ctx.logits()
    best = logits.top(2)
    assert best[0][0] == logits.argmax()
    assert best[0][1] > best[1][1] > 0
    assert logits.dtype == np.float32
    assert logits.shape == (ctx.n_vocab,)
