"""Test that statistics of frames equal those of cells."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from timeline_kit import timeline

from pyllamakv.runtime import metrics
from pyllamakv.runtime.snapshot import CellMap, Snapshot
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.view import frame_statistics
from pyllamakv.view.frame_statistics import PictureStats

#: The sequences of each cell, as bits; 0 is free.
STREAM = st.lists(st.sampled_from([0, 0, 1, 2, 4, 3]), min_size=1, max_size=30)


@given(st.lists(STREAM, min_size=1, max_size=3))
def test_a_picture_counts_like_a_snapshot(streams: list[list[int]]) -> None:
    """All counts of cells are equal, also with several streams, and so are the exported metrics."""
    maps = []
    for bits in streams:
        seqs = np.array(bits, dtype=np.uint64)[:, None]
        pos = np.where(np.array(bits) > 0, np.arange(len(bits)), -1).astype(np.int32)
        maps.append(CellMap(pos, np.zeros(len(bits), dtype=np.int32), seqs))
    snapshot = Snapshot(tuple(maps))
    counted, exact = PictureStats(Picture.of(snapshot)), snapshot.stats
    names = (
        "size",
        "used",
        "free",
        "shared",
        "holes",
        "largest_hole",
        "used_max_p1",
        "fragmentation",
    )
    for name in names:
        assert getattr(counted, name) == getattr(exact, name), name
    if not exact.shared:
        assert metrics.prometheus(counted) == metrics.prometheus(exact)
        assert counted.to_json() == exact.to_json()
        spans = {n: (each.cells, each.spans) for n, each in exact.per_sequence.items()}
        found = {n: (each.cells, each.spans) for n, each in counted.per_sequence.items()}
        assert found == spans
    else:
        assert not counted.per_sequence


def test_statistics_count_operations_failures_and_moves() -> None:
    """Operations, failures and moves are equal in every format."""
    raw = frame_statistics.to_json(timeline())
    assert raw["operations"] == {"decode": 3, "defrag": 1, "remove": 1}
    assert raw["failures"] == {"decode: no-slot": 1}
    assert raw["cells_moved"] == 1
    exposed = metrics.expose(frame_statistics.timeline_metrics(timeline()))
    assert 'pyllamakv_run_operations_total{op="decode"} 3\n' in exposed
    assert 'pyllamakv_run_failures_total{op="decode",failure="no-slot"} 1\n' in exposed
    assert ("failures", "1 decode: no-slot") in frame_statistics.rows(timeline())
