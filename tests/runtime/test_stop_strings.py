"""Test stop strings in text that arrives in parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import UsageError
from pyllamakv.runtime.stop_strings import StopStrings, check_stop_strings


def through(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Feed parts, and return all output and the stop string."""
    stops, out = StopStrings(stop), ""
    for piece in pieces:
        out += stops.feed(piece)
        if stops.found is not None:
            return out, stops.found
    return out + stops.flush(), None


def test_text_ends_before_the_stop_string() -> None:
    """Check stop strings within a part and across parts, and texts that only begin like one."""
    assert through(["one two three"], ("two",)) == ("one ", "two")
    assert through(["one t", "w", "o three"], ("two",)) == ("one ", "two")
    assert through(["one t", "wi", "ce"], ("two",)) == ("one twice", None)
    assert through(["ab", "ab", "c"], ("abc",)) == ("ab", "abc")
    assert through(["x", "###"], ("##", "x#")) == ("", "x#")


def test_possible_start_of_a_stop_string_is_withheld() -> None:
    """A suffix that begins a stop string is withheld."""
    stops = StopStrings(("</s>", "\n\n"))
    assert stops.feed("a</") == "a"
    assert stops.feed("b\n") == "</b"
    assert stops.feed("c") == "\nc"
    assert stops.feed("<") == ""
    assert stops.flush() == "<"


def test_wrong_stop_strings_are_refused() -> None:
    """An empty one would stop at once."""
    assert check_stop_strings("ab") == ("ab",)
    assert check_stop_strings(["a", "b"]) == ("a", "b")
    for wrong in ("", [""], [b"a"], [1]):
        with pytest.raises(UsageError):
            check_stop_strings(wrong)  # type: ignore[arg-type]


letters = st.text("ab", max_size=12)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_string_is_found_across_pieces(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    """Compare with a search in the whole text, for any parts."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007
    expected: tuple[str, bool] = (text, False)
    for end in range(1, len(text) + 1):
        ending = [each for each in stop if text[:end].endswith(each)]
        if ending:
            expected = (text[: end - max(map(len, ending))], True)
            break
    out, found = through(pieces, tuple(stop))
    assert (out, found is not None) == expected
