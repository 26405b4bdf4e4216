"""Read the K and V rows of a sequence from its saved state, exactly as the cache stores them.

The layouts of llama.cpp differ in the data before the cells and after each position. Each layout is
a candidate, and the one that explains every byte is used, without a version check. V may be stored
by columns (transposed, without flash attention) or by rows.

A state consists of the full cache, then a sliding-window cache, then the states of recurrent
layers. Later releases write a magic number and the sequence before them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pyllamakv.errors import StateError, UsageError
from pyllamakv.runtime.ggml_types import NumberType, number_type

Rows = NDArray[np.uint8]

#: Start of a sequence state in later releases, before the sequence id.
MAGIC = 0xAF143CD8

#: Maximum number of consecutive caches in a state, more than any memory has.
MOST = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Name one layout: a count of streams in front, bytes of extra data per cell, V or no V.

    ``rotations`` means that the sizes of two rotations follow the number of layers.
    """

    name: str
    streams: bool
    extra: int
    values: bool
    rotations: bool = False


LAYOUTS = (
    Layout("plain", False, 0, True),
    Layout("streams", True, 0, True),
    Layout("streams with places", True, 8, True),
    Layout("streams with places and tokens", True, 12, True),
    Layout("streams without V", True, 0, False),
    # since b11549
    Layout("rotations", True, 0, True, rotations=True),
    Layout("rotations with places and tokens", True, 12, True, rotations=True),
    Layout("rotations without V", True, 0, False, rotations=True),
)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer: ``k`` and ``v`` are (cells, bytes of a row) uint8; ``v`` may be empty."""

    type_k: NumberType
    k: Rows
    type_v: NumberType | None
    v: Rows


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of a sequence in one stream of one cache: ``pos`` (cells,), and its layers.

    ``cache`` counts the caches of the memory: 1 is the sliding-window one of a pair. A recurrent
    section follows them. It has one row per layer, the state after ``pos``: ``k`` are the columns
    of the convolution, ``v`` is the state.
    """

    pos: NDArray[np.int32]
    layers: tuple[LayerRows, ...]
    v_transposed: bool
    cache: int = 0
    stream: int = 0
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A parsed state: one section per cache that has cells (two with a sliding window)."""

    layout: str
    sections: tuple[Section, ...]

    @property
    def cells(self) -> int:
        """Return the cells of the fullest cache."""
        counts = (len(section.pos) for section in self.sections if not section.recurrent)
        return max(counts, default=0)


class Reader:
    """Read the bytes of a state in order. Raises WrongLayout at the end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = np.frombuffer(data, dtype=np.uint8)
        self.at = 0

    def take(self, n: int) -> Rows:
        """Return a view of the next ``n`` bytes."""
        if n < 0 or self.at + n > len(self.data):
            raise WrongLayout
        part = self.data[self.at : self.at + n]
        self.at += n
        return part

    def number(self, form: str) -> int:
        """Return the next number, in a format of `struct`."""
        try:
            (found,) = struct.unpack_from(form, self.data.data, self.at)
        except struct.error:
            raise WrongLayout from None
        self.at += struct.calcsize(form)
        return int(found)


class WrongLayout(Exception):
    """A layout does not explain the bytes."""


def parse(data: bytes | memoryview) -> SequenceState:
    """Parse the state of one sequence, as ``state_save`` of the library gave it.

    Raises StateError when no known layout explains every byte.
    """
    for layout in LAYOUTS:
        try:
            return SequenceState(layout.name, tuple(_sections(Reader(data), layout)))
        except WrongLayout:
            continue
    msg = (
        f"these {len(data)} bytes are not a sequence state of any known layout "
        f"({', '.join(layout.name for layout in LAYOUTS)}); they may be damaged, or come from "
        "a memory without rows"
    )
    raise StateError(msg)


def _sections(reader: Reader, layout: Layout) -> list[Section]:
    if not len(reader.data):
        raise WrongLayout
    skip_magic(reader)
    return [section for section in _caches(reader, layout, 0) if len(section.pos)]


def _caches(reader: Reader, layout: Layout, cache: int) -> list[Section]:
    """Read this cache and all that follow it."""
    start = reader.at
    if start == len(reader.data):
        return []
    if cache == MOST:
        raise WrongLayout
    try:
        return _cache(reader, layout, cache) + _caches(reader, layout, cache + 1)
    except WrongLayout:
        if not cache:
            raise
        # The states of recurrent layers may follow the last cache. The state of one token at
        # position 0 begins like a cache without cells; only the rest distinguishes them.
        reader.at = start
        return _recurrent(reader, cache)


def skip_magic(reader: Reader) -> None:
    """Skip the magic number and the sequence that later releases write first."""
    if len(reader.data) >= 8 and reader.number("<I") == MAGIC:
        reader.take(4)
    else:
        reader.at = 0


def _cache(reader: Reader, layout: Layout, cache: int) -> list[Section]:
    streams = reader.number("<I") if layout.streams else 1
    if not 1 <= streams <= 4096:
        raise WrongLayout
    found = []
    for stream in range(streams):
        cells = reader.number("<I")
        if cells or not layout.streams:
            section = _section(reader, layout, cells)
            found.append(replace(section, cache=cache, stream=stream))
    return found


def _section(reader: Reader, layout: Layout, cells: int) -> Section:
    pos = _positions(reader, layout, cells)
    transposed, n_layer = reader.number("<I"), reader.number("<I")
    if layout.rotations:
        reader.take(8)
    if transposed > 1 or not 1 <= n_layer <= 4096:
        raise WrongLayout
    keys = [_rows(reader, cells) for _ in range(n_layer)]
    values: list[tuple[NumberType, Rows]] = []
    if layout.values:
        read = _columns if transposed else _rows
        values = [read(reader, cells) for _ in range(n_layer)]
    none: tuple[None, Rows] = (None, np.empty((cells, 0), dtype=np.uint8))
    layers = tuple(LayerRows(*keys[i], *(values[i] if values else none)) for i in range(n_layer))
    return Section(pos, layers, bool(transposed))


def _recurrent(reader: Reader, cache: int) -> list[Section]:
    """Read to the end: the number of all layers is written, but only the rows of recurrent ones."""
    cells = reader.number("<I")
    pos = _positions(reader, LAYOUTS[0], cells)
    if reader.number("<I") != 0 or not 1 <= reader.number("<I") <= 4096:
        raise WrongLayout
    found = []
    while reader.at < len(reader.data):
        found.append(_rows(reader, cells))
    half = len(found) // 2
    if not half or len(found) % 2:
        raise WrongLayout
    layers = tuple(LayerRows(*found[i], *found[half + i]) for i in range(half))
    return [Section(pos, layers, False, cache, recurrent=True)]


def _positions(reader: Reader, layout: Layout, cells: int) -> NDArray[np.int32]:
    # A cell has its position, the number of its sequences (0 or 1 in the state of one sequence),
    # and optionally a place in an image and the sequence.
    if cells == 0:
        return np.empty(0, dtype=np.int32)
    return positions(read_cells(reader, layout, cells))


def read_cells(reader: Reader, layout: Layout, cells: int) -> Rows:
    """Read the table of cells (cells, bytes of a cell) in front of K and V."""
    start = reader.at
    reader.take(4)
    own = reader.number("<I")
    reader.at = start
    if own > 1:
        raise WrongLayout
    width = 8 + layout.extra + 4 * own
    table = reader.take(cells * width).reshape(cells, width)
    numbers = np.ascontiguousarray(table).view("<i4")
    if (numbers[:, 1] != own).any() or (numbers[:, 0] < 0).any():
        raise WrongLayout
    return table


def positions(table: Rows) -> NDArray[np.int32]:
    """Return the positions (cells,) of a table of cells."""
    return np.ascontiguousarray(table[:, :4]).view("<i4")[:, 0].astype(np.int32)


def _rows(reader: Reader, cells: int) -> tuple[NumberType, Rows]:
    kind, width = read_kind(reader), reader.number("<Q")
    if width % kind.bytes or width > 1 << 40:
        raise WrongLayout
    return kind, reader.take(cells * width).reshape(cells, width)


def _columns(reader: Reader, cells: int) -> tuple[NumberType, Rows]:
    kind, element, n = read_kind(reader), reader.number("<I"), reader.number("<I")
    if element != kind.bytes:
        raise WrongLayout
    columns = reader.take(n * cells * element).reshape(n, cells, element)
    return kind, np.ascontiguousarray(columns.transpose(1, 0, 2)).reshape(cells, n * element)


def read_kind(reader: Reader) -> NumberType:
    """Read the number of a ggml type."""
    try:
        return number_type(reader.number("<i"))
    except UsageError:
        raise WrongLayout from None
