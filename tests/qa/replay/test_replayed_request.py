"""Test that traces are read as cells, and capacities are shares of the unique ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import UsageError
from qa.replay.replayed_request import ReplayedRequest, read_trace, share_of, unique_cells

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trace_is_read(tmp_path: Path) -> None:
    """There is a cell per block, in the order of the lines."""
    path = tmp_path / "trace.jsonl"
    rows = [[0, 1, 2], [0, 3], [0, 1, 2, 4]]
    path.write_text("".join(json.dumps({"hash_ids": row}) + "\n" for row in rows), "utf-8")
    found = read_trace(path)
    assert [list(each.prompt) for each in found] == rows
    assert [each.text for each in found] == [()] * 3
    assert read_trace(path, 2) == found[:2]
    assert unique_cells(found) == 5


@pytest.mark.parametrize(
    "text", ["", "[]\n", '{"hash_ids": []}\n', '{"hash_ids": [-1]}\n', "{", '{"hash_ids": 3}\n']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """Another format is refused, and so is a file without requests."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"trace\.jsonl"):
        read_trace(path)
    with pytest.raises(UsageError, match="missing"):
        read_trace(tmp_path / "missing")


def test_equal_ids_after_other_blocks_are_other_cells() -> None:
    """A cell depends on all cells before it."""
    found = [ReplayedRequest((1, 2)), ReplayedRequest((3, 2), (4,)), ReplayedRequest((1, 2), (4,))]
    assert unique_cells(found) == 6


def test_a_capacity_has_room_for_each_request() -> None:
    """One percent of the cells may be less than a prompt needs."""
    found = [ReplayedRequest((n, n), (n,)) for n in range(100)]
    assert share_of(0.5, found) == 150
    assert share_of(0.001, found) == 3
