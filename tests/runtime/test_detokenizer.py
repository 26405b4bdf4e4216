"""Test that bytes become the same text however they are split."""

from __future__ import annotations

import hypothesis_profile  # noqa: F401
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.runtime.detokenizer import IncrementalDetokenizer, decode, encode

CHARACTER = st.characters(exclude_categories=["Cs"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Split bytes at these places."""
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def joined(pieces: list[bytes]) -> str:
    """Feed all pieces and flush."""
    stream = IncrementalDetokenizer()
    return "".join([*map(stream.feed, pieces), stream.flush()])


def cesu(text: str) -> bytes:
    """Encode with surrogates of three bytes each, as text from UTF-16 has them."""
    units = text.encode("utf-16-le")
    return b"".join(
        chr(int.from_bytes(units[i : i + 2], "little")).encode("utf-8", "surrogatepass")
        for i in range(0, len(units), 2)
    )


@given(st.text(CHARACTER), st.lists(st.integers(0, 1000)))
def test_text_decodes_alike_at_every_split(text: str, places: list[int]) -> None:
    """Check that no split changes the text."""
    assert joined(cut(text.encode(), places)) == text


@given(st.text(CHARACTER), st.lists(st.integers(0, 1000)))
def test_pairs_of_surrogates_become_their_character(text: str, places: list[int]) -> None:
    """Check text that was written as UTF-16 surrogates, split anywhere."""
    assert joined(cut(cesu(text), places)) == text


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from(
                [b"\xed", b"\xed\xa0", b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xf0\x9f", b"\xe2\x82"]
            ),
            st.text(CHARACTER, max_size=2).map(str.encode),
        )
    ).map(b"".join),
    st.lists(st.integers(0, 1000)),
)
def test_invalid_bytes_decode_alike_at_every_split(data: bytes, places: list[int]) -> None:
    """Check that splitting does not change the result, and nothing raises."""
    assert joined(cut(data, places)) == joined([data]) == decode(data)


def test_incomplete_characters_wait_for_their_last_byte() -> None:
    """Check that a character waits for its last byte, and a lone surrogate for its pair."""
    stream = IncrementalDetokenizer()
    assert [stream.feed(bytes([b])) for b in "€".encode()] == ["", "", "€"]
    pair = cesu("😀")
    assert stream.feed(pair[:3]) == ""
    assert stream.feed(b"x") == "\ufffdx"
    assert stream.feed(pair[:4]) + stream.feed(pair[4:]) == "😀"


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"\xff", "\ufffd"), (b"\xed\xa0\x80", "\ufffd"), (b"\xed\xb0\x80a", "\ufffda"), (b"", "")],
)
def test_invalid_bytes_become_one_replacement_character(data: bytes, text: str) -> None:
    """Check stray bytes and lone surrogates."""
    assert decode(data) == text
    assert joined([data]) == text


def test_text_with_surrogates_can_be_encoded() -> None:
    """Check pairs and lone surrogates in a Python string."""
    assert encode("\ud83d\ude00") == "😀".encode()
    assert encode("a\ud83db") == "a\ufffdb".encode()
    assert encode("plain") == b"plain"
