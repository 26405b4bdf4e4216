"""Every cell of a KV cache at one moment, as numpy arrays.

A cell is free if its position is -1. A hole is a maximal run of free cells. All statistics are
computed from the cells, not from counters of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

#: Number of set bits of each byte value.
_ONES = ((np.arange(256)[:, None] >> np.arange(8)) & 1).sum(axis=1).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """The statistics of one sequence.

    ``cells`` is the number of its cells, of which other sequences share ``shared``. ``spans`` is
    the number of runs of adjacent cells.
    """

    cells: int
    pos_min: int
    pos_max: int
    spans: int
    shared: int


class PerSequence(Mapping[int, SequenceStats]):
    """The statistics of each sequence that has cells, by its id; computed on access."""

    def __init__(self, maps: Sequence[CellMap]) -> None:
        self._maps = tuple(maps)
        self._known: dict[int, SequenceStats] = {}

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of cells of every sequence, by its id."""
        return np.asarray(sum(each.counts for each in self._maps), dtype=np.int64)

    def __getitem__(self, sequence: int) -> SequenceStats:
        if sequence not in self:
            raise KeyError(sequence)
        if sequence not in self._known:
            self._known[sequence] = self._count(sequence)
        return self._known[sequence]

    def __contains__(self, sequence: object) -> bool:
        counts = self.counts
        return isinstance(sequence, int) and 0 <= sequence < len(counts) and counts[sequence] > 0

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.counts).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.counts))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{i}: {self.counts[i]} cells" for i in self) + "}"

    def _count(self, sequence: int) -> SequenceStats:
        found = [(each, np.flatnonzero(each.has(sequence))) for each in self._maps]
        found = [(each, cells) for each, cells in found if cells.size]
        pos = np.concatenate([each.pos[cells] for each, cells in found])
        shared = sum(int(np.count_nonzero(each.sharers[cells] > 1)) for each, cells in found)
        spans = sum(int(np.count_nonzero(np.diff(cells) != 1)) + 1 for _, cells in found)
        return SequenceStats(len(pos), int(pos.min()), int(pos.max()), spans, shared)


@dataclass(frozen=True)
class KVStats:
    """The statistics of the cells of a cache, in cells.

    ``holes`` is the number of runs of free cells. ``used_max_p1`` is the highest used cell plus
    one, summed over streams: the cells that attention visits. ``fragmentation`` is the share of
    free cells outside of the largest hole, from 0 (one hole, or no free cell) to almost 1.
    """

    size: int
    used: int
    free: int
    holes: int
    largest_hole: int
    used_max_p1: int
    per_sequence: PerSequence

    @property
    def fragmentation(self) -> float:
        """The share of free cells outside of the largest hole, 0 to 1."""
        return 1.0 - self.largest_hole / self.free if self.free else 0.0

    @cached_property
    def shared(self) -> int:
        """Return the number of cells that more than one sequence uses."""
        maps = self.per_sequence._maps
        return sum(int(np.count_nonzero(each.sharers > 1)) for each in maps)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        names = ("size", "used", "free", "holes", "largest_hole", "used_max_p1", "fragmentation")
        counts = self.per_sequence.counts
        per_sequence = {str(i): int(counts[i]) for i in np.flatnonzero(counts)}
        facts = {name: getattr(self, name) for name in names}
        facts["fragmentation"] = round(self.fragmentation, 6)
        return {**facts, "per_sequence": per_sequence}


@dataclass(frozen=True, eq=False)
class CellMap:
    """Store the cells of one stream.

    ``pos`` (n,) int32 are positions, -1 for a free cell. ``shift`` (n,) int32 are pending shifts,
    already included in ``pos``. ``seqs`` (n, words) uint64 has one bit per sequence. ``info`` is
    the library's description of the cache (`binding.protocol.CellsInfo`), or None.
    """

    pos: NDArray[np.int32]
    shift: NDArray[np.int32]
    seqs: NDArray[np.uint64]
    info: Any = None

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def stream(self) -> int:
        """The number of the stream in its cache."""
        return int(self.info.stream) if self.info is not None else 0

    @property
    def swa(self) -> bool:
        """Whether the cells belong to a sliding-window cache."""
        return bool(self.info is not None and self.info.swa)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """Return which cells are used, (n,) bool."""
        return self.pos >= 0

    @cached_property
    def holes(self) -> NDArray[np.int64]:
        """Return the holes, (holes, 2): first cell and length."""
        # A used cell before the first and after the last one ends holes there.
        used = np.ones(len(self) + 2, np.bool_)
        used[1:-1] = self.used
        holes = np.flatnonzero(used[1:] != used[:-1]).reshape(-1, 2)
        holes[:, 1] -= holes[:, 0]
        return holes

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of cells of every sequence, (64 * words,)."""
        words = self.seqs.shape[1]
        octets = np.ascontiguousarray(self.seqs, dtype="<u8").view(np.uint8).reshape(-1)
        if not octets.size:
            return np.zeros(64 * words, dtype=np.int64)
        # One byte per bit, eight of them in a word: 128 rows add up without a carry between bytes.
        packed = np.unpackbits(octets, bitorder="little").view(np.uint64).reshape(-1, 8 * words)
        sums = np.add.reduceat(packed, np.arange(0, len(packed), 128), axis=0)
        table = sums.view(np.uint8).reshape(-1, 64 * words)
        return np.asarray(table.sum(axis=0, dtype=np.int64))

    @cached_property
    def sharers(self) -> NDArray[np.int64]:
        """Return how many sequences use each cell, (n,)."""
        octets = np.ascontiguousarray(self.seqs, dtype="<u8").view(np.uint8)
        return np.asarray(_ONES[octets].sum(axis=1, dtype=np.int64))

    def has(self, sequence: int) -> NDArray[np.bool_]:
        """Return the cells that a sequence uses, (n,) bool."""
        word, bit = divmod(arguments.integer("sequence", sequence, 0), 64)
        if not 0 <= word < self.seqs.shape[1]:
            return np.zeros(len(self), dtype=np.bool_)
        return np.asarray((self.seqs[:, word] & np.uint64(1 << bit)) != 0)

    def fits(self, n: int, contiguous: bool = True) -> bool:
        """Return whether ``n`` more cells fit, in one hole or scattered."""
        n = arguments.integer("n", n, 0)
        contiguous = arguments.flag("contiguous", contiguous)
        if n == 0:
            return True
        holes = self.holes[:, 1]
        if not holes.size:
            return False
        return int(holes.max() if contiguous else holes.sum()) >= n

    @property
    def stats(self) -> KVStats:
        """Return the statistics of this stream alone."""
        return _statistics((self,))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All streams of all caches of a context at one moment.

    ``contiguous``: a micro-batch needs one hole (None: unknown).
    """

    streams: tuple[CellMap, ...]
    contiguous: bool | None = None

    @cached_property
    def stats(self) -> KVStats:
        """Return the statistics of the cells (of the full cache in a sliding-window memory)."""
        return _statistics(self._main)

    @property
    def _main(self) -> tuple[CellMap, ...]:
        return tuple(each for each in self.streams if not each.swa) or self.streams

    def fits(self, n: int, contiguous: bool | None = None, *, stream: int | None = None) -> bool:
        """Return whether a micro-batch of ``n`` tokens fits into ``stream`` (None: any).

        ``contiguous`` defaults to the property of the context, and to True if unknown.
        """
        n = arguments.integer("n", n, 0)
        stream = arguments.whole_or_none("stream", stream, 0)
        if contiguous is None:
            contiguous = self.contiguous is not False
        chosen = [each for each in self._main if stream is None or each.stream == stream]
        return any(each.fits(n, contiguous) for each in chosen)

    def moves_to(self, other: Snapshot) -> Moves:
        """Match each cell with the cell of ``other`` that has the same tokens.

        Cells match if position and sequences are equal. Raises UsageError if the snapshots differ
        in shape.
        """
        arguments.instance("other", other, Snapshot, "a Snapshot")
        if [each.seqs.shape for each in self.streams] != [e.seqs.shape for e in other.streams]:
            msg = "moves_to needs two snapshots of one context: their caches differ in size"
            raise UsageError(msg)
        pairs = zip(self.streams, other.streams, strict=True)
        return Moves.join([find_moves(a.pos, a.seqs, b.pos, b.seqs) for a, b in pairs])


def _statistics(maps: tuple[CellMap, ...]) -> KVStats:
    size = sum(map(len, maps))
    used = sum(int(np.count_nonzero(each.used)) for each in maps)
    holes = [each.holes for each in maps]
    largest = max((int(each[:, 1].max()) for each in holes if len(each)), default=0)
    used_max_p1 = 0
    for each, gaps in zip(maps, holes, strict=True):
        ends_free = len(gaps) > 0 and int(gaps[-1].sum()) == len(each)
        used_max_p1 += int(gaps[-1, 0]) if ends_free else len(each)
    n_holes = sum(map(len, holes))
    return KVStats(size, used, size - used, n_holes, largest, used_max_p1, PerSequence(maps))


@dataclass(frozen=True, eq=False)
class Moves:
    """The moved cells, in order: arrays ``stream``, ``source`` and ``target`` (n,) of int64.

    ``stream`` is an index of ``Snapshot.streams``; the others are old and new cells of that stream.
    ``vanished`` and ``appeared`` count used cells that exist on one side only.
    """

    stream: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    vanished: int = 0
    appeared: int = 0

    @staticmethod
    def join(parts: Sequence[Moves]) -> Moves:
        """Concatenate the moves of several streams."""
        for part in arguments.items("parts", parts, "a list of Moves"):
            arguments.instance("an item of parts", part, Moves, "Moves")
        stream = [np.full(len(part), i, dtype=np.int64) for i, part in enumerate(parts)]
        empty = np.empty(0, dtype=np.int64)
        return Moves(
            np.concatenate([empty, *stream]),
            np.concatenate([empty, *(part.source for part in parts)]),
            np.concatenate([empty, *(part.target for part in parts)]),
            sum(part.vanished for part in parts),
            sum(part.appeared for part in parts),
        )

    @property
    def cells(self) -> int:
        """The number of moved cells."""
        return len(self.source)

    @property
    def runs(self) -> int:
        """The number of runs: copies of adjacent cells."""
        if not len(self):
            return 0
        same = np.diff(self.stream) == 0
        steps = same & (np.diff(self.source) == 1) & (np.diff(self.target) == 1)
        return len(self) - int(np.count_nonzero(steps))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Return (old cell, new cell) pairs, (n, 2)."""
        return np.column_stack((self.source, self.target))

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self.source.tolist(), self.target.tolist(), strict=True))

    def __str__(self) -> str:
        lost = f", {self.vanished} vanished" if self.vanished else ""
        new = f", {self.appeared} appeared" if self.appeared else ""
        return f"{self.cells} cells moved in {self.runs} runs{lost}{new}"


def find_moves(
    old_pos: NDArray[np.int32],
    old_seqs: NDArray[np.uint64],
    new_pos: NDArray[np.int32],
    new_seqs: NDArray[np.uint64],
) -> Moves:
    """Match old with new cells of one stream.

    A cell with the same position and sequences has not moved. If several others are equal, they are
    matched in order.
    """
    same = (old_pos == new_pos) & (old_seqs == new_seqs).all(axis=1)
    old = np.flatnonzero((old_pos >= 0) & ~same)
    new = np.flatnonzero((new_pos >= 0) & ~same)
    pos, seqs = ((old_pos[old], new_pos[new]), (old_seqs[old], new_seqs[new]))
    kinds = _kinds(np.concatenate(pos), np.concatenate(seqs))
    old_keys, new_keys = _numbered(kinds[: len(old)]), _numbered(kinds[len(old) :])
    _, left, right = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
    source, target = old[left], new[right]
    order = np.argsort(source, kind="stable")
    lost, new_ones = len(old) - len(order), len(new) - len(order)
    stream = np.zeros(len(order), dtype=np.int64)
    return Moves(stream, source[order], target[order], lost, new_ones)


def _kinds(pos: NDArray[np.int32], seqs: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Assign a number to each distinct pair (position, sequences)."""
    order = np.lexsort((*seqs.T, pos))
    changed = (np.diff(pos[order]) != 0) | (np.diff(seqs[order], axis=0) != 0).any(axis=1)
    numbers = np.empty(len(pos), dtype=np.int64)
    numbers[order] = np.concatenate(([0], np.cumsum(changed)))[: len(pos)]
    return numbers


def _numbered(kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count equal cells by occurrence, so that the first matches the first."""
    order = np.argsort(kinds, kind="stable")
    ordered = kinds[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(np.append(starts, len(ordered)))
    occurrence = np.arange(len(ordered)) - np.repeat(starts, lengths)
    numbers = np.empty(len(kinds), dtype=np.int64)
    # Both sides are shorter than 2**31, so this is one number per (kind, occurrence).
    numbers[order] = (ordered << 32) | occurrence
    return numbers
