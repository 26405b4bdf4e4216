"""Test that encoded batches decode to the same batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import UsageError
from pyllamakv.traces import batch_encoding

LANE = st.integers(0, 5) | st.lists(st.integers(0, 5), min_size=2, max_size=3, unique=True)
ROW = st.tuples(st.integers(0, 99), st.integers(0, 40), LANE, st.integers(0, 1))


def nothing(_: int) -> int:
    raise AssertionError("positions were given")


@given(st.lists(ROW, min_size=1, max_size=8), st.booleans())
def test_encoded_batches_decode_to_the_same_batch(rows: list, flagged: bool) -> None:
    """Any batch can be encoded, and the encoding is valid in a script."""
    tokens, pos, seq, flags = (list(part) for part in zip(*rows, strict=True))
    words = batch_encoding.encode(tokens, pos, seq, flags if flagged else None)
    assert batch_encoding.check(words) == ""
    feed = batch_encoding.decode_words(words, nothing)
    assert feed.token.tolist() == tokens
    assert feed.pos.tolist() == pos
    assert list(feed.owners) == [tuple(e) if isinstance(e, list) else (e,) for e in seq]
    expected = flags if flagged else [0] * (len(tokens) - 1) + [1]
    assert feed.logits.tolist() == expected


def test_default_fields_are_omitted() -> None:
    """One sequence and a range of positions are numbers; logits of the last token are omitted."""
    words = batch_encoding.encode([7, 8, 9], [4, 5, 6], [2, 2, 2])
    assert words == {"tokens": [7, 8, 9], "seq": 2, "pos": 4}
    # Several owners of one token are not one sequence per token.
    shared = batch_encoding.encode([7, 8], [0, 1], [[1, 2], [1, 2]])
    assert shared["seq"] == [[1, 2], [1, 2]]


def test_missing_positions_continue_each_sequence() -> None:
    """Positions continue at the end of each sequence, also within the batch."""
    words = {"tokens": [1, 2, 3, 4], "seq": [0, 1, [0, 2], 0]}
    feed = batch_encoding.decode_words(words, lambda seq: 10 * seq)
    assert feed.pos.tolist() == [0, 10, 1, 2]


@given(st.lists(ROW, min_size=2, max_size=8), st.data())
def test_truncated_batch_keeps_its_first_tokens(rows: list, data: st.DataObject) -> None:
    """The first tokens are unchanged; a batch without logits requests those of the last token."""
    tokens, pos, seq, flags = (list(part) for part in zip(*rows, strict=True))
    n = data.draw(st.integers(1, len(tokens)))
    words = batch_encoding.cut(batch_encoding.encode(tokens, pos, seq, flags), n)
    assert batch_encoding.check(words) == ""
    feed = batch_encoding.decode_words(words, nothing)
    assert (feed.token.tolist(), feed.pos.tolist()) == (tokens[:n], pos[:n])


def test_joined_batches_keep_their_order_and_logits() -> None:
    """The joined batch has the logits of both."""
    one = {"tokens": [1, 2], "seq": 0}
    other = {"tokens": [3], "seq": [1], "logits": "all"}
    joined = batch_encoding.join(one, other)
    assert joined == {"tokens": [1, 2, 3], "seq": [0, 0, 1], "logits": [1, 2]}
    assert batch_encoding.join(one, one)["seq"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"tokens": [], "seq": 0}, "tokens"),
        ({"tokens": "ab", "seq": 0}, "tokens"),
        ({"tokens": [2**40], "seq": 0}, "tokens"),
        ({"tokens": [1, 2], "seq": [0]}, "seq"),
        ({"tokens": [1], "seq": [[]]}, "seq"),
        ({"tokens": [1], "seq": True}, "seq"),
        ({"tokens": [1, 2], "seq": 0, "pos": [1]}, "pos"),
        ({"tokens": [1, 2], "seq": 0, "logits": "some"}, "logits"),
        ({"tokens": [1, 2], "seq": 0, "logits": [2]}, "logits"),
    ],
)
def test_invalid_batch_keys_are_named(words: dict, says: str) -> None:
    """The message starts with the invalid key."""
    assert batch_encoding.check(words).startswith(says)


def test_sequence_counts_assign_ids_to_tokens() -> None:
    """Counts define which sequences belong to which token."""
    seq, counts = np.array([0, 1, 2, 0], np.int32), np.array([1, 2, 1], np.int32)
    assert batch_encoding.owners(seq, counts) == [0, [1, 2], 0]
    with pytest.raises(UsageError, match="no place 3"):
        batch_encoding.decode_words({"tokens": [1], "seq": 0, "logits": [3]}, lambda _: 0)
