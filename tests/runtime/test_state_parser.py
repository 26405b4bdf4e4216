"""Test that rows are read from the states of every layout, and that others are refused."""

from __future__ import annotations

import contextlib
import struct

import hypothesis_profile  # noqa: F401
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_kit import F16, Q8_0, rows, section, state

from pyllamakv.errors import StateError
from pyllamakv.runtime import state_parser
from pyllamakv.runtime.state_parser import MAGIC, parse

LAYOUTS = [layout.name for layout in state_parser.LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("cells", [1, 7])
def test_parsed_rows_equal_the_written_rows(layout: str, trans: bool, cells: int) -> None:
    """Check every layout, V by rows and by columns."""
    k, v, pos = rows(cells, 64), rows(cells, 32, 1), list(range(3, 3 + cells))
    found = parse(state(layout, [section(layout, pos, k, v, trans=trans)]))
    assert found.layout == layout
    assert found.cells == cells
    (part,) = found.sections
    assert part.pos.tolist() == pos
    assert part.v_transposed == trans
    for i, layer in enumerate(part.layers):
        assert layer.type_k.name == "f16"
        assert (layer.k == k[i]).all()
        if "without V" in layout:
            assert layer.v.shape == (cells, 0)
            assert layer.type_v is None
        else:
            assert (layer.v == v[i]).all()


def test_streams_without_cells_are_passed_over() -> None:
    """Check a state of four streams of which one has the sequence."""
    k, v = rows(3, 64), rows(3, 64, 1)
    empty = section("streams", [], k, v, trans=False)
    full = section("streams", [0, 1, 2], k, v, trans=False)
    found = parse(state("streams", [empty, empty, full, empty]))
    assert [part.stream for part in found.sections] == [2]
    assert (found.sections[0].layers[1].v == v[1]).all()


@pytest.mark.parametrize("layout", ["plain", "streams"])
def test_a_sliding_window_is_a_second_section(layout: str) -> None:
    """Check two caches one after the other."""
    a, b = rows(5, 64), rows(2, 64, 1)
    first = state(layout, [section(layout, [0, 1, 2, 3, 4], a, a, trans=True)])
    second = state(layout, [section(layout, [3, 4], b, b, trans=True)])
    found = parse(first + second)
    assert [(part.cache, len(part.pos)) for part in found.sections] == [(0, 5), (1, 2)]
    assert (found.sections[1].layers[0].v == b[0]).all()


@pytest.mark.parametrize("layout", ["plain", "streams"])
def test_state_header_of_later_releases_is_skipped(layout: str) -> None:
    """Check the magic number and the sequence before the caches."""
    k, v = rows(3, 64), rows(3, 64, 1)
    raw = state(layout, [section(layout, [0, 1, 2], k, v, trans=True)])
    found = parse(struct.pack("<Ii", MAGIC, 5) + raw)
    assert found.layout == layout
    assert (found.sections[0].layers[1].k == k[1]).all()


@pytest.mark.parametrize("layout", ["plain", "streams"])
def test_recurrent_states_follow_the_cells(layout: str) -> None:
    """Check a hybrid model of four layers, of which two are recurrent, also after one token."""
    for n in (3, 1):
        check_hybrid(layout, n)


def check_hybrid(layout: str, n: int) -> None:
    k, states = rows(n, 64), rows(1, 128, 2)
    behind = struct.pack("<IiIII", 1, n - 1, 0, 0, 4)
    for layer in (*states, *states[::-1]):
        behind += struct.pack("<iQ", 0, 128) + layer.tobytes()
    found = parse(state(layout, [section(layout, [*range(n)], k, k, trans=True)]) + behind)
    cache, recurrent = found.sections
    assert (cache.cache, cache.recurrent, found.cells) == (0, False, n)
    assert (recurrent.cache, recurrent.recurrent, recurrent.pos.tolist()) == (1, True, [n - 1])
    assert (recurrent.layers[0].k == states[0]).all()
    assert (recurrent.layers[0].v == states[1]).all()


@given(st.integers(0, 400), st.binary(max_size=3))
def test_a_cut_or_longer_state_is_refused(length: int, more: bytes) -> None:
    """Check that no bytes may be missing or left over.

    No position may be read as a count: two streams without cells are a state of 12 bytes.
    """
    whole = state("plain", [section("plain", [7, 8], rows(2, 64), rows(2, 64, 1), trans=False)])
    data = whole[: length % len(whole)] + more
    if data != whole:
        with pytest.raises(StateError, match="not a sequence state"):
            parse(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_state_error(data: bytes) -> None:
    """Check that random bytes raise nothing but StateError."""
    with contextlib.suppress(StateError):
        parse(data)


def test_quantized_rows_are_kept_as_bytes() -> None:
    """Check a q8_0 row of 64 values: 68 bytes."""
    k = rows(2, 68)
    raw = section("plain", [0, 1], k, k, trans=False)
    raw = raw.replace(struct.pack("<iQ", F16, 68), struct.pack("<iQ", Q8_0, 68))
    found = parse(raw)
    assert found.sections[0].layers[0].type_v.name == "q8_0"
    assert (found.sections[0].layers[0].k == k[0]).all()


def test_a_state_without_cells_has_no_sections() -> None:
    """Check the state of an empty sequence."""
    raw = section("plain", [], rows(0, 64), rows(0, 64), trans=False)
    assert parse(raw).sections == ()
    assert parse(struct.pack("<II", 1, 0)).sections == ()
