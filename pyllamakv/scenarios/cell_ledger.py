"""Track the expected content of a cache in plain Python, independent of cell indexes.

This is the reference of everything that verifies cells: scenarios, random operations, fuzzing and
the simulated library of the tests. It shares no code with the ledgers of `pyllamakv.runtime`, which
it is compared with, and imports nothing from there.

The ledger identifies cells by content, not by index: a cell has one position and one or several
sequences, as in a unified cache of llama.cpp. If each sequence has its own stream, a copy has its
own cells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: A cell's content: its position and the sequences that own it.
Content = tuple[int, tuple[int, ...]]


@dataclass
class Cell:
    """The cell of one token: its position and its owners."""

    pos: int
    seqs: set[int]
    token: int = -1


@dataclass
class CellLedger:
    """Follow every operation on a cache; ``cells`` has no order."""

    cells: list[Cell] = field(default_factory=list)
    streams: bool = False

    def add(self, tokens: Iterable[int], pos: Iterable[int], seqs: Iterable[Iterable[int]]) -> None:
        """Add the tokens of a decoded batch."""
        for token, at, owners in zip(tokens, pos, seqs, strict=True):
            self.cells.append(Cell(int(at), set(owners), int(token)))

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a sequence from its cells in [p0, p1); negative bounds are open, seq < 0: all."""
        for cell in self._range(p0, p1):
            if seq < 0:
                cell.seqs.clear()
            cell.seqs.discard(seq)
        self._drop()

    def discard(self, cells: Iterable[Cell]) -> None:
        """Remove cells from all of their sequences."""
        for cell in cells:
            cell.seqs.clear()
        self._drop()

    def copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Add ``dst`` to the cells of ``src`` in [p0, p1); between streams, copy the cells."""
        if self.streams:
            if src != dst:
                self.replace(dst, self.of(src))
            return
        for cell in self._range(p0, p1):
            if src in cell.seqs:
                cell.seqs.add(dst)

    def keep(self, seq: int) -> None:
        """Remove every other sequence."""
        for cell in self.cells:
            cell.seqs &= {seq}
        self._drop()

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions by ``delta``; cells whose position becomes negative are freed."""
        for cell in self._range(p0, p1):
            if seq in cell.seqs:
                cell.pos += delta
                if cell.pos < 0:
                    cell.seqs.clear()
        self._drop()

    def divide(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions, as grouped attention does."""
        for cell in self._range(p0, p1):
            if seq in cell.seqs:
                cell.pos //= divisor

    def clear(self) -> None:
        """Forget everything."""
        self.cells.clear()

    def replace(self, seq: int, cells: Iterable[tuple[int, int]]) -> None:
        """Replace the content of ``seq`` by (position, token) pairs: a restored state."""
        self.remove(seq)
        self.cells.extend(Cell(pos, {seq}, token) for pos, token in cells)

    def of(self, seq: int) -> list[tuple[int, int]]:
        """Return the (position, token) pairs of a sequence, by position."""
        return sorted((cell.pos, cell.token) for cell in self.cells if seq in cell.seqs)

    def next(self, seq: int) -> int:
        """Return the position after the last of a sequence, 0 when it is empty."""
        return max((cell.pos for cell in self.cells if seq in cell.seqs), default=-1) + 1

    @property
    def used(self) -> int:
        """Count the cells in use."""
        return len(self.cells)

    @property
    def sequences(self) -> list[int]:
        """List the sequences that own a cell."""
        return sorted({seq for cell in self.cells for seq in cell.seqs})

    def contents(self) -> Counter[Content]:
        """Count the cells of each content."""
        return Counter((cell.pos, tuple(sorted(cell.seqs))) for cell in self.cells)

    def _range(self, p0: int, p1: int) -> list[Cell]:
        low = max(p0, 0)
        return [cell for cell in self.cells if cell.pos >= low and (p1 < 0 or cell.pos < p1)]

    def _drop(self) -> None:
        self.cells = [cell for cell in self.cells if cell.seqs]


def window_errors(ledger: CellLedger, found: Mapping[int, Sequence[int]], window: int) -> str:
    """Describe missing or surplus cells of a sliding-window cache; empty if there are none.

    ``found`` has the positions of each sequence. A cache must have the last ``window - 1``
    positions of a sequence, which its next token sees. Older ones may be present or not, because
    their cells can be reused, but the remaining ones must be contiguous.
    """
    for seq in sorted({*ledger.sequences, *found}):
        whole = [pos for pos, _ in ledger.of(seq)]
        here = sorted(found.get(seq, ()))
        there = set(here)
        ghosts = [pos for pos in here if pos not in set(whole)]
        if ghosts or len(here) != len(there):
            return f"{len(here) - len(there) + len(ghosts)} ghost cells of sequence {seq} ({here})"
        lost = [p for p in whole if p > whole[-1] + 1 - window and p not in there]
        lost = lost or [p for p in whole if here and p > here[0] and p not in there]
        if lost:
            return f"{len(lost)} cells of sequence {seq} lost from its window (position {lost[0]})"
    return ""


def reusable_cells(contents: Mapping[Content, int], size: int, window: int) -> int:
    """Count the cells of a sliding-window cache of ``size`` cells that the next tokens may use.

    These are free cells, and cells outside of the window of their only sequence: llama.cpp does not
    reuse cells that several sequences share.
    """
    ends: dict[int, int] = {}
    for pos, owners in contents:
        for seq in owners:
            ends[seq] = max(ends.get(seq, -1), pos)
    kept = sum(
        count
        for (pos, owners), count in contents.items()
        if len(owners) > 1 or pos > ends[owners[0]] + 1 - window
    )
    return size - kept


def cell_differences(expected: Counter[Content], found: Counter[Content]) -> tuple[int, int, str]:
    """Return how many cells are lost, how many are ghosts, and a line that names the first ones."""
    lost, ghosts = expected - found, found - expected
    parts = []
    if lost:
        parts.append(f"{lost.total()} cells lost ({_name(lost)})")
    if ghosts:
        parts.append(f"{ghosts.total()} ghost cells ({_name(ghosts)})")
    return lost.total(), ghosts.total(), ", ".join(parts)


def _name(cells: Counter[Content], limit: int = 3) -> str:
    shown = [
        f"position {pos} of sequence {'+'.join(map(str, seqs)) or '?'}"
        for pos, seqs in sorted(cells)[:limit]
    ]
    return ", ".join(shown) + (", …" if len(cells) > limit else "")
