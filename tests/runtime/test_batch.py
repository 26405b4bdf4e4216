"""Test the layout of batches, and that numpy arrays are not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit

from pyllamakv.errors import Closed, UsageError
from pyllamakv.runtime.batch import Batch, as_int32, to_arrays

if TYPE_CHECKING:
    from pathlib import Path


def test_arrays_are_taken_without_a_copy() -> None:
    """Check that int32 arrays are passed unchanged."""
    tokens, pos = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)
    flags = np.zeros(4, dtype=np.int8)
    arrays = Batch.of(tokens, pos, 2, flags).arrays()
    assert np.shares_memory(arrays.token, tokens)
    assert np.shares_memory(arrays.logits, flags)
    assert arrays.seq.tolist() == [2, 2, 2, 2]
    assert arrays.counts is None


def test_tokens_may_belong_to_several_sequences() -> None:
    """Check counts and the flat list of ids."""
    batch = Batch().add(5, 0, [0, 1]).add(6, 1, 1, logits=True)
    arrays = batch.arrays()
    assert arrays.counts.tolist() == [2, 1]
    assert arrays.seq.tolist() == [0, 1, 1]
    assert arrays.logits.tolist() == [0, 1]
    assert len(batch) == 2
    assert len(Batch.of([1], [0], [0, 1], counts=[2])) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], [0], 0), {}, "positions"),
        (([1, 2], [0, 1], [0]), {}, "sequences"),
        (([1, 2], [0, 1], 0), {"logits": [1]}, "logits"),
        (([1, 2], [0, 1], [0, 0]), {"counts": [1]}, "counts"),
        (([1, 2], [0, 1], [0]), {"counts": [1, 0]}, "at least one"),
        (([1.5], [0], 0), {}, "a whole number, not 1.5"),
        ((["x"], [0], 0), {}, "a whole number .*, not 'x'"),
        (([[1]], [0], 0), {}, "a whole number"),
        (([2**31], [0], 0), {}, "32 bits"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments: tuple, options: dict, message: str) -> None:
    """Check lengths, types and ranges."""
    with pytest.raises(UsageError, match=message):
        Batch.of(*arguments, **options)


def test_a_token_without_sequence_is_refused() -> None:
    """Check an empty list of ids, and adding to arrays."""
    with pytest.raises(UsageError, match="at least one"):
        Batch().add(1, 0, [])
    with pytest.raises(UsageError, match="created from arrays"):
        Batch.of([1], [0], 0).add(2, 1)


def test_feeds_continue_at_the_end_of_their_sequences(tmp_path: Path) -> None:
    """Check positions, ids and flags of several feeds."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode(a.feed([9, 9, 9]))
    feeds = [a.feed([5, 6]), b.feed([7, 8], logits="all"), ctx.sequence().feed([4], logits="none")]
    arrays = to_arrays(ctx, feeds)
    assert arrays.token.tolist() == [5, 6, 7, 8, 4]
    assert arrays.pos.tolist() == [3, 4, 0, 1, 0]
    assert arrays.seq.tolist() == [0, 0, 1, 1, 2]
    assert arrays.logits.tolist() == [0, 1, 1, 1, 0]


def test_a_feed_of_int32_tokens_is_not_copied(tmp_path: Path) -> None:
    """Check that one feed of int32 tokens reaches C without a copy."""
    ctx = kit.context(tmp_path)
    tokens = np.arange(8, dtype=np.int32)
    arrays = to_arrays(ctx, ctx.sequence().feed(tokens[2:6]))
    assert np.shares_memory(arrays.token, tokens)
    assert arrays.pos.tolist() == [0, 1, 2, 3]
    assert arrays.seq.tolist() == [0] * 4
    assert arrays.logits.tolist() == [0, 0, 0, 1]


def test_arrays_may_be_changed_and_decoded_again(tmp_path: Path) -> None:
    """Check a batch that is advanced in place."""
    ctx = kit.context(tmp_path)
    tokens, pos = np.array([5, 6], dtype=np.int32), np.zeros(2, dtype=np.int32)
    batch = Batch.of(tokens, pos, np.arange(2), np.ones(2, dtype=np.int8))
    for _ in range(3):
        ctx.decode(batch)
        tokens += 1
        pos += 1
    assert [ledger.tokens for ledger in ctx.ledgers[:2]] == [[5, 6, 7], [6, 7, 8]]


def test_invalid_feeds_are_refused(tmp_path: Path) -> None:
    """Check invalid types, and duplicate, foreign and closed sequences."""
    ctx, other = kit.context(tmp_path), kit.context(tmp_path)
    a = ctx.sequence()
    for wrong, message in (
        ([[1, 2]], "must be feeds"),
        ([a.feed([1]), a.feed([2])], "once per batch"),
        (other.sequence().feed([1]), "another context"),
    ):
        with pytest.raises(UsageError, match=message):
            ctx.decode(wrong)
    feed = a.feed([1, 2])
    a.close()
    with pytest.raises(Closed):
        ctx.decode(feed)


def test_iterables_of_tokens_become_arrays() -> None:
    """Check ranges, generators and empty iterables."""
    assert as_int32(range(3), "tokens").tolist() == [0, 1, 2]
    assert as_int32((i for i in (4, 5)), "tokens").tolist() == [4, 5]
    assert as_int32([], "tokens").dtype == np.int32
    with pytest.raises(UsageError):
        as_int32(object(), "tokens")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("a text", "model.tokenize converts a text"),
        (["a text"], "model.tokenize converts a text"),
        ([{"role": "user", "content": "Hi"}], "model.tokenize_chat converts a chat"),
    ],
)
def test_a_text_is_no_tokens(given: object, hint: str) -> None:
    """The error names the tokenizer, except where it would not help."""
    with pytest.raises(TypeError, match=rf"^tokens.* \({hint}\), not"):
        as_int32(given, "tokens")
    with pytest.raises(TypeError, match=r"^positions[^()]* not") as caught:
        as_int32(given, "positions")
    assert hint not in str(caught.value)
