"""Cell maps from hypothesis and from lists."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pyllamakv.binding.protocol import CellsInfo
from pyllamakv.runtime.snapshot import CellMap

#: One cell: its position (None: free) and its sequences.
CELL = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 50), st.sets(st.integers(0, 130), min_size=1, max_size=4)),
)


CELLS = st.lists(CELL, max_size=60)


def cell_map(cells: list, words: int = 3, stream: int = 0, swa: bool = False) -> CellMap:
    """Create a map from a list of cells."""
    pos = np.array([-1 if cell is None else cell[0] for cell in cells], dtype=np.int32)
    seqs = np.zeros((len(cells), words), dtype=np.uint64)
    for i, cell in enumerate(cells):
        for seq in cell[1] if cell else ():
            seqs[i, seq // 64] |= np.uint64(1 << (seq % 64))
    info = CellsInfo(stream, swa, len(cells), -1, -1, False, 1, 1, 1, False, True, 0, 0)
    return CellMap(pos, np.zeros_like(pos), seqs, info)
