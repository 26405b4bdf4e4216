"""Test that parts of states are selected and joined, byte for byte."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from state_kit import F16, rows, section, state

import pyllamakv as kv
from pyllamakv.errors import StateError
from pyllamakv.runtime import state_slices
from pyllamakv.runtime.state_parser import LAYOUTS, MAGIC

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant


def made(layout: str, pos: list[int], *, trans: bool) -> bytes:
    """Return a state whose rows depend on the positions."""
    k, v = rows(64, 64), rows(64, 32, 1)
    return state(layout, [section(layout, pos, k[:, pos], v[:, pos], trans=trans)])


@pytest.mark.parametrize("layout", [each.name for each in LAYOUTS])
@pytest.mark.parametrize("trans", [False, True])
def test_joined_parts_equal_the_whole_state(layout: str, trans: bool) -> None:
    """States of every layout are split and joined: the bytes are equal."""
    whole = made(layout, list(range(10)), trans=trans)
    found = state_slices.read(whole)
    assert found.layout == layout
    assert found.to_bytes() == whole
    assert np.shares_memory(found.cut(slice(0, 10)).to_bytes(), np.frombuffer(whole, np.uint8))
    parts = [found.cut(slice(a, b)) for a, b in ((0, 3), (3, 4), (4, 10))]
    assert state_slices.join(parts) == whole
    for part, pos in zip(parts, ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9]), strict=True):
        assert part.to_bytes() == made(layout, pos, trans=trans)
        assert len(part.to_bytes()) == found.size(len(pos))
        assert part.positions.tolist() == pos


@pytest.mark.parametrize("trans", [False, True])
def test_a_layer_without_values_is_joined(trans: bool) -> None:
    """In a layer without heads there is no K and no V."""
    k, v = rows(64, 0), rows(64, 0, 1)

    def part(pos: list[int]) -> bytes:
        return state("streams", [section("streams", pos, k[:, pos], v[:, pos], trans=trans)])

    found = state_slices.read(part([0, 1, 2]))
    assert found.to_bytes() == part([0, 1, 2])
    assert found.cut(slice(0, 1)).to_bytes() == part([0])


def test_selected_cells_are_written_in_order() -> None:
    """A state is written in the order of cells, not of positions."""
    found = state_slices.read(made("streams", [5, 2, 9, 0], trans=True))
    ordered = found.cut(np.argsort(found.positions))
    assert ordered.to_bytes() == made("streams", [0, 2, 5, 9], trans=True)


def test_other_sequences_and_streams_are_joined() -> None:
    """Parts of another sequence in another stream are joined."""
    head = struct.pack("<IIII", MAGIC, 3, 2, 0)
    other = struct.pack("<III", MAGIC, 1, 2)
    body = made("streams", [0, 1, 2], trans=False)[4:]
    more = made("streams", [3, 4], trans=False)[4:]
    end = struct.pack("<I", 0)
    parts = [state_slices.read(head + body), state_slices.read(other + more + end)]
    assert (
        state_slices.join(parts)
        == head[:12] + made("streams", [0, 1, 2, 3, 4], trans=False)[4:] + end
    )


def test_states_of_other_memories_are_refused() -> None:
    """They are two caches, cells in two streams, and bytes that are not a state."""
    one = section("streams", [0, 1], rows(2, 64), rows(2, 64), trans=False)
    for bad in (
        state("streams", [one]) * 2,
        state("streams", [one, one]),
        state("streams", [struct.pack("<I", 0)]),
        b"",
        b"\1\2\3",
        state("streams", [one])[:-1],
    ):
        with pytest.raises(StateError):
            state_slices.read(bad)


def test_parts_of_other_shapes_are_not_joined() -> None:
    """They have other layers, types or layout of V."""
    narrow = section("plain", [0], rows(1, 32), rows(1, 32), trans=False)
    wide = made("plain", [1], trans=False)
    for other in (narrow, made("plain", [1], trans=True), made("streams", [1], trans=False)):
        with pytest.raises(StateError, match="different shapes"):
            state_slices.join([state_slices.read(wide), state_slices.read(other)])
    huge = struct.pack("<IiIII", 1, 0, 0, 0, 1) + struct.pack("<iQ", F16, 1 << 39)
    with pytest.raises(StateError):
        state_slices.read(huge)


@pytest.mark.native
@pytest.mark.parametrize("options", [{}, {"flash_attn": True}], ids=["columns", "rows"])
def test_a_library_reads_joined_parts(
    variant: Variant, tiny_model: Path, options: dict[str, bool]
) -> None:
    """Joined parts of a scattered sequence are restored: its rows are those of the whole."""
    with (
        kv.open(variant.folder) as library,
        library.load_model(tiny_model) as model,
        model.context(n_ctx=256, n_seq_max=3, **options) as ctx,
    ):
        a, b, c = (ctx.sequence() for _ in range(3))
        for token in range(20):
            ctx.step_all([a, b], [token + 1, token + 2])
        found = state_slices.read(ctx.native.state_save(ctx.handle, a.id))
        ordered = found.cut(np.argsort(found.positions))
        raw = state_slices.join([ordered.cut(slice(0, 7)), ordered.cut(slice(7, 20))])
        assert ctx.native.state_load(ctx.handle, c.id, raw) == len(raw)
        assert ctx.native.state_save(ctx.handle, c.id)[8:] == raw[8:]
