"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import UsageError
from pyllamakv.runtime.stop_strings import StopStrings, check_stop_strings


def through(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Feed pieces, and return all that came out, and the stop string."""
    stops, out = StopStrings(stop), ""
    for piece in pieces:
        out += stops.feed(piece)
        if stops.found is not None:
            return out, stops.found
    return out + stops.flush(), None


def test_text_ends_before_the_stop_string() -> None:
    """Within a piece, and across pieces; what only looked like one comes out."""
    assert through(["one two three"], ("two",)) == ("one ", "two")
    assert through(["one t", "w", "o three"], ("two",)) == ("one ", "two")
    assert through(["one t", "wi", "ce"], ("two",)) == ("one twice", None)
    assert through(["ab", "ab", "c"], ("abc",)) == ("ab", "abc")
    assert through(["x", "###"], ("##", "x#")) == ("", "x#")


def test_nothing_that_may_be_a_stop_string_comes_out() -> None:
    """The end that begins one waits."""
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
def test_pieces_make_no_difference(text: str, stop: list[str], data: st.DataObject) -> None:
    """Compare with a search letter by letter in the whole text, wherever pieces are cut."""
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
