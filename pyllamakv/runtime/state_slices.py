"""Cut the saved state of an attention cache into ranges of cells, and join ranges to one state.

A saved state has a table of cells, then K and V of each layer for all of them. `read` finds these
arrays; `CellState.cut` selects cells in each, and `join` writes the cells of several states one
after the other. The layouts are those of `state_parser`. Only states of one cache can be cut: the
window of a sliding-window cache, and the states of recurrent layers, belong to a whole sequence.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.errors import StateError
from pyllamakv.runtime.state_parser import (
    LAYOUTS,
    Layout,
    Reader,
    WrongLayout,
    positions,
    read_cells,
    read_kind,
    skip_magic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pyllamakv.runtime.state_parser import Rows


@dataclass(frozen=True, slots=True, eq=False)
class CellArray:
    """One array of a state, after the constant bytes ``head``; ``axis`` counts the cells."""

    head: bytes
    values: Rows
    axis: int

    def cut(self, cells: Any) -> CellArray:
        """Return the array of some cells: a slice, or their indexes."""
        where: Any = cells if self.axis == 0 else (slice(None), cells)
        return CellArray(self.head, self.values[where], self.axis)

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of one cell."""
        shape = self.values.shape
        return math.prod(shape[: self.axis] + shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class CellState:
    """The state of one sequence in one attention cache.

    ``start`` precedes the number of cells, and ``end`` follows the last array. The first array is
    the table of cells. ``data`` is all of it, if it was read and not cut.
    """

    layout: str
    start: bytes
    arrays: tuple[CellArray, ...]
    end: bytes
    data: memoryview | None = None

    @property
    def positions(self) -> NDArray[np.int32]:
        """Return the positions (cells,) int32, in the order of the cells."""
        return positions(self.arrays[0].values)

    def cut(self, cells: Any) -> CellState:
        """Return the state of some cells: a slice, or their indexes in the wanted order."""
        if isinstance(cells, slice) and cells == slice(0, len(self.arrays[0].values)):
            return self
        arrays = tuple(each.cut(cells) for each in self.arrays)
        return CellState(self.layout, self.start, arrays, self.end)

    def size(self, cells: int) -> int:
        """Return the bytes of this state with another number of cells."""
        fixed = len(self.start) + 4 + len(self.end) + sum(len(each.head) for each in self.arrays)
        return fixed + cells * sum(each.cell_bytes for each in self.arrays)

    def to_bytes(self) -> memoryview:
        """Return the state as the library reads it, without a copy if it was not cut."""
        return self.data or join([self])


def read(data: bytes | memoryview) -> CellState:
    """Find the arrays of a state. Raises StateError if it has other content than one cache."""
    for layout in LAYOUTS:
        try:
            return _read(Reader(data), layout)
        except WrongLayout:
            continue
    msg = f"these {len(data)} bytes are not the state of one attention cache"
    raise StateError(msg)


def _read(reader: Reader, layout: Layout) -> CellState:
    skip_magic(reader)
    streams = reader.number("<I") if layout.streams else 1
    start = reader.data[: reader.at].tobytes()
    if not 1 <= streams <= 4096:
        raise WrongLayout
    found: list[tuple[CellArray, ...]] = []
    for _ in range(streams):
        cells = reader.number("<I")
        if cells:
            found.append(_arrays(reader, layout, cells))
    if len(found) != 1 or reader.at != len(reader.data):
        raise WrongLayout
    # The library reads the cells of any stream into that of the sequence: the others are empty.
    end = struct.pack("<I", 0) * (streams - 1)
    return CellState(layout.name, start, found[0], end, reader.data.data)


def _arrays(reader: Reader, layout: Layout, cells: int) -> tuple[CellArray, ...]:
    found = [CellArray(b"", read_cells(reader, layout, cells), 0)]
    begin = reader.at
    transposed, n_layer = reader.number("<I"), reader.number("<I")
    if layout.rotations:
        reader.take(8)
    if transposed > 1 or not 1 <= n_layer <= 4096:
        raise WrongLayout
    for number in range(n_layer * (2 if layout.values else 1)):
        kind = read_kind(reader)
        if transposed and number >= n_layer:
            element, n = reader.number("<I"), reader.number("<I")
            if element != kind.bytes:
                raise WrongLayout
            shape: tuple[int, ...] = (n, cells, element)
            axis = 1
        else:
            width = reader.number("<Q")
            if width % kind.bytes or width > 1 << 40:
                raise WrongLayout
            shape, axis = (cells, width), 0
        head = reader.data[begin : reader.at].tobytes()
        values = reader.take(math.prod(shape)).reshape(shape)
        found.append(CellArray(head, values, axis))
        begin = reader.at
    return tuple(found)


def join(parts: Sequence[CellState]) -> memoryview:
    """Return one state with the cells of all parts, in order.

    Raises StateError if the parts differ in layout, layers or types.
    """
    first = parts[0]
    shape = _shape(first)
    if any(_shape(each) != shape for each in parts[1:]):
        msg = "the parts of a state belong to caches of different shapes"
        raise StateError(msg)
    total = sum(len(part.arrays[0].values) for part in parts)
    # NumPy asks for huge pages: the page faults of many megabytes take longer than their copy.
    made = np.empty(first.size(total), np.uint8)
    at = 0

    def add(piece: bytes) -> None:
        nonlocal at
        made[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)

    add(first.start + struct.pack("<I", total))
    for number, array in enumerate(first.arrays):
        add(array.head)
        values = [part.arrays[number].values for part in parts]
        sizes = list(array.values.shape)
        sizes[array.axis] = total
        end = at + math.prod(sizes)
        np.concatenate(values, axis=array.axis, out=made[at:end].reshape(sizes))
        at = end
    add(first.end)
    return made.data


def _shape(state: CellState) -> tuple[Any, ...]:
    """Return what states that can be joined have in common; ``start`` names their sequences."""
    arrays = tuple((each.head, each.axis, each.cell_bytes) for each in state.arrays)
    return (state.layout, len(state.start), state.end, arrays)
