"""Compare K and V as stored: every byte of every sequence, position and layer.

The bytes come from sequence states, which llama.cpp writes cell by cell. Ordered by position, they
are independent of cell indexes, so a defragmentation must not change them.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.errors import ScenarioFailed
from pyllamakv.runtime import state_parser

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.binding.protocol import ContextHandle, Native
    from pyllamakv.runtime.snapshot import CellMap, Snapshot
    from pyllamakv.scenarios.cell_ledger import Content

#: The parsed states by sequence.
Rows = dict[int, state_parser.SequenceState]


def read(native: Native, context: ContextHandle, sequences: Iterable[int]) -> Rows:
    """Return K and V of the sequences as stored."""
    return {seq: state_parser.parse(native.state_save(context, seq)) for seq in sequences}


def compare(before: Rows, after: Rows, what: str, *, window: int = 0) -> None:
    """Raise ScenarioFailed unless ``after`` contains all of ``before`` with the same bytes.

    With a ``window``, the second cache needs only the positions that the next token sees. States of
    recurrent layers are compared if no token followed. A sequence has one stream of each cache,
    which differs if its state was restored into another sequence.
    """
    for seq, old in before.items():
        new = after.get(seq)
        sections = {each.cache: each for each in new.sections} if new else {}
        for section in old.sections:
            other = sections.get(section.cache)
            if other is None:
                msg = f"{what} lost sequence {seq}: {old.cells} tokens"
                raise ScenarioFailed(msg, failure="lost")
            if section.recurrent and section.pos.max() != other.pos.max():
                continue
            first = int(other.pos.max()) + 2 - window if window and section.cache == 1 else 0
            _compare_sections(section, other, seq, what, first)


def _compare_sections(
    old: state_parser.Section, new: state_parser.Section, seq: int, what: str, first: int
) -> None:
    order = np.argsort(new.pos, kind="stable")
    ordered = new.pos[order]
    kept = np.flatnonzero(old.pos >= first)
    pos = old.pos[kept]
    places = np.searchsorted(ordered, pos)
    there = places < len(ordered)
    there[there] = ordered[places[there]] == pos[there]
    if not there.all():
        gone = np.sort(pos[~there])
        msg = f"{what} lost {len(gone)} tokens of sequence {seq}, first position {gone[0]}"
        raise ScenarioFailed(msg, failure="lost", evidence={"sequence": seq})
    rows = order[places]
    for layer, (one, other) in enumerate(zip(old.layers, new.layers, strict=True)):
        for which, before, after in (("K", one.k, other.k), ("V", one.v, other.v)):
            wrong = (before[kept] != after[rows]).any(axis=1)
            if wrong.any():
                first = int(pos[wrong].min())
                msg = (
                    f"{what} changed {int(wrong.sum())} of {len(wrong)} {which} rows of layer "
                    f"{layer}, first at position {first} of sequence {seq}"
                )
                evidence = {"sequence": seq, "layer": layer, "position": first, "of": which}
                raise ScenarioFailed(msg, failure="data", evidence=evidence)


def contents(snapshot: Snapshot) -> Counter[Content]:
    """Count the cells of each content in a snapshot, of the full cache where there are two."""
    found: Counter[Content] = Counter()
    for cells in [cells for cells in snapshot.streams if not cells.swa] or snapshot.streams:
        found += stream_contents(cells)
    return found


def stream_contents(cells: CellMap) -> Counter[Content]:
    """Count the cells of each content in one stream."""
    used = np.flatnonzero(cells.pos >= 0)
    words = map(tuple, cells.seqs[used].tolist())
    return Counter(zip(cells.pos[used].tolist(), map(owners, words), strict=True))


def sliding(snapshot: Snapshot) -> dict[int, list[int]] | None:
    """Return the positions of each sequence in the sliding-window cache, or None without one."""
    streams = [cells for cells in snapshot.streams if cells.swa]
    if not streams:
        return None
    found: dict[int, list[int]] = {}
    for cells in streams:
        for seq in np.flatnonzero(cells.counts).tolist():
            found.setdefault(seq, []).extend(cells.pos[cells.has(seq)].tolist())
    return found


@lru_cache(maxsize=1 << 12)
def owners(words: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sequences whose bits are set in the words of a cell."""
    return tuple(
        64 * place + bit
        for place, word in enumerate(words)
        for bit in range(word.bit_length())
        if word >> bit & 1
    )
