"""Look into a context for a cache manager: its cells as text, and whether its records agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import MemoryType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.snapshot import CellMap, Snapshot


def describe(context: Context) -> str:
    """Return the content of sequences and runs of cells as text, one line each."""
    with context.lock:
        snapshot = context.kv.try_snapshot()
    lines = [
        f"sequence {number}: {len(ledger)} tokens at positions "
        f"{ledger.positions[0]}..{ledger.positions[-1]}"
        for number, ledger in enumerate(context.ledgers)
        if len(ledger)
    ]
    if snapshot is None:
        return "\n".join([f"{context.info.n_ctx} cells, which this build cannot show", *lines])
    stats = snapshot.stats
    head = (
        f"{stats.size} cells, {stats.used} used, {stats.free} free in {stats.holes} holes, the "
        f"largest of {stats.largest_hole}"
    )
    for cells in snapshot.streams:
        kind = "window, " if cells.swa else ""
        lines += [f"{kind}stream {cells.stream}, {line}" for line in _runs(cells)]
    return "\n".join([head, *lines])


def _runs(cells: CellMap) -> Iterator[str]:
    follows = np.diff(cells.pos) == 1
    follows |= ~cells.used[1:] & ~cells.used[:-1]
    follows &= (cells.seqs[1:] == cells.seqs[:-1]).all(axis=1)
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist()] if len(cells) else []
    for first, end in zip(starts, [*starts[1:], len(cells)], strict=True):
        where = f"cells {first}..{end - 1}: "
        if not cells.used[first]:
            yield f"{where}free"
            continue
        bits = np.unpackbits(cells.seqs[first].astype("<u8").view(np.uint8), bitorder="little")
        ids = " ".join(map(str, np.flatnonzero(bits).tolist()))
        yield f"{where}positions {cells.pos[first]}..{cells.pos[end - 1]} of sequences {ids}"


def check_ledgers(context: Context) -> None:
    """Raise AssertionError unless the library has exactly the tokens that the ledgers record."""
    with context.lock:
        snapshot = context.kv.try_snapshot()
        for number, ledger in enumerate(context.ledgers):
            last = context.native.seq_pos_max(context.handle, number)
            # Some releases report a recurrent state of one token as empty.
            unclear = context.info.memory == MemoryType.RECURRENT and len(ledger) == 1
            if len(ledger) and context.info.memory != MemoryType.SWA and not unclear:
                agree(last == ledger.next - 1, f"sequence {number} ends at {last} in the library")
    if snapshot is None or context.info.memory == MemoryType.RECURRENT:
        return
    main = [each for each in snapshot.streams if not each.swa]
    lost = sum(int(np.count_nonzero(each.used & (each.sharers == 0))) for each in main)
    agree(not lost, f"{lost} cells are used by no sequence")
    for number, ledger in enumerate(context.ledgers):
        there = _positions(snapshot, number)
        agree(
            there == ledger.positions,
            f"cells that no ledger knows, or that are missing: those of sequence {number} have "
            f"positions {there}, its ledger {ledger.positions}",
        )
    if len({each.stream for each in snapshot.streams}) == 1:
        marks = {mark for ledger in context.ledgers for mark in ledger.marks}
        used = snapshot.stats.used
        agree(used == len(marks), f"{used} cells are used for {len(marks)} tokens")


def _positions(snapshot: Snapshot, number: int) -> list[int]:
    main = [each for each in snapshot.streams if not each.swa]
    return sorted(pos for each in main for pos in each.pos[each.has(number)].tolist())


def agree(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with a text unless something holds."""
    if not holds:
        raise AssertionError(otherwise)
