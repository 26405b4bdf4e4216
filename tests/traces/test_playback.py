"""Test playing a trace: frames with the owner of each cell, and failures at the end."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import ScriptError
from pyllamakv.scenarios.cell_picture import FREE, Picture
from pyllamakv.scenarios.frames import Frame, Timeline
from pyllamakv.traces import playback, script
from pyllamakv.traces.script import Line

OWNERS = st.lists(st.integers(-2, 4), min_size=1, max_size=24).map(tuple)


def line(number: int, op: str, result: dict, **arguments) -> Line:
    return Line(number, op, arguments, result)


def runs(*pairs: tuple[int, int]) -> dict:
    return {"label": "", "runs": [list(pair) for pair in pairs]}


def test_a_trace_becomes_a_timeline() -> None:
    """Rows without cells keep the previous ones; failures and moves are shown."""
    lines = [
        line(2, "context", {}, n_ctx=4),
        line(3, "decode", {"picture": runs((0, 2), (1, 2)), "status": 0}, feed={"0": 2, "1": "hi"}),
        line(4, "remove", {"picture": runs((-1, 2), (1, 2)), "done": True}, seq=0),
        line(5, "decode", {"status": 1}, feed={"2": [1, 2, 3]}),
        line(6, "note", {}, text="now"),
        line(7, "defrag", {"picture": runs((1, 2), (-1, 2)), "cells": 2}),
        line(8, "defrag", {"picture": runs((1, 2), (-1, 2)), "moved": [[2, 0, 2]]}),
        line(9, "restore", {"done": False}, seq=0),
    ]
    found = playback.timeline_of_trace(lines, "it")
    assert [frame.number for frame in found.frames] == [3, 4, 5, 6, 7, 8, 9]
    assert [frame.number for frame in found.changes()] == [3, 4, 7]
    found.frames = found.operations()
    assert [frame.number for frame in found.frames] == [3, 4, 5, 7, 8, 9]
    assert [frame.failed for frame in found.frames] == ["", "", "no-slot", "", "", "refused"]
    assert found.frames[2].picture is found.frames[1].picture
    assert found.frames[3].moves == found.frames[4].moves == ((2, 0, 2),)
    assert found.frames[0].detail == '0: 2 tokens, 1: "hi"'
    assert found.frames[2].caption() == "decode 2: 3 tokens; no-slot: 3 tokens, largest hole 2"
    assert found.frames[3].caption() == "defrag; 2 cells moved"
    assert found.cells == 4


def test_frame_without_cells_has_the_used_count() -> None:
    """Until the next snapshot, only the number of used cells is known."""
    lines = [
        line(2, "context", {"n_ctx": 8, "used": 0}),
        line(3, "decode", {"status": 0, "used": 3}, feed={"0": 3}),
        line(4, "decode", {"status": 1, "used": 3}, feed={"0": 9}),
        line(5, "remove", {"picture": runs((-1, 2), (1, 2), (-1, 4)), "used": 2}, seq=0),
        line(6, "decode", {"status": 1, "used": 2}, feed={"0": 9}),
        line(7, "decode", {"status": 0, "used": 4}, feed={"0": 2}),
        line(8, "shift", {"done": True}),
    ]
    found = playback.timeline_of_trace(lines)
    assert found.cells == 8
    assert [frame.counted for frame in found.frames] == [0, 3, 3, None, None, 4, 4]
    assert [frame.used for frame in found.frames] == [0, 3, 3, 2, 2, 4, 4]
    assert [frame.failure for frame in found.frames if frame.failed] == [
        "no-slot", "9 tokens, largest hole 4",
    ]  # fmt: skip
    assert not any(frame.moved for frame in found.frames)
    assert Timeline.from_json(found.to_json()) == found


@pytest.mark.regression(
    "a few bytes of a trace could allocate all memory for the cells of its frames",
    by="hostile input",
    of="Python",
)
def test_timeline_with_too_many_cells_is_refused(monkeypatch) -> None:
    """A few bytes of a trace can claim cells for all memory, once per frame."""
    monkeypatch.setattr(script, "DRAWN", 8)
    lines = [line(number, "clear", {"picture": runs((0, 4))}) for number in (2, 3, 4)]
    assert len(playback.timeline_of_trace(lines[:2])) == 2
    with pytest.raises(ScriptError, match=r"line 4 \(clear\): the pictures up to here have 12"):
        playback.timeline_of_trace(lines)


@given(OWNERS, st.randoms(use_true_random=False))
def test_inferred_moves_reproduce_the_owners(owners: tuple[int, ...], chance) -> None:
    """Applying the inferred moves gives the recorded owners, except for new cells."""
    after = list(owners)
    chance.shuffle(after)
    moved = list(owners)
    found = list(playback.infer(owners, tuple(after)))
    for source, _, length in found:
        moved[source : source + length] = [FREE] * length
    for source, target, length in found:
        moved[target : target + length] = owners[source : source + length]
    assert moved == after
    assert sum(length for *_, length in found) <= int(np.sum(np.array(owners) != after))


@given(st.lists(st.tuples(OWNERS, st.sampled_from(["", "no-slot"])), max_size=6))
def test_timeline_round_trips_through_json(steps) -> None:
    """Frames are written and read as JSON, and unchanged cells are written once."""
    made = Timeline("x")
    for number, (owners, failed) in enumerate(steps, 1):
        picture = Picture("", owners)
        made.frames.append(Frame(number, "decode", "d", picture, failed, ((0, 1, 2),), 2))
    raw = made.to_json()
    assert Timeline.from_json(json.loads(json.dumps(raw))) == made
    changes = sum(a != b for (a, _), (b, _) in pairwise(steps)) + bool(steps)
    assert sum("picture" in frame for frame in raw["frames"]) == changes
