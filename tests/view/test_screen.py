"""The terminal shows what happens, cell by cell, and a log gets plain text."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from timeline_kit import frame, timeline

from pyllamakv.scenarios.cell_picture import FREE, SHARED, Picture
from pyllamakv.traces.playback import infer
from pyllamakv.view.screen import Screen, legend, on_the_way


def console(width: int = 80, *, terminal: bool) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=24, force_terminal=terminal,
        color_system=None, _environ={},
    )  # fmt: skip


def shown(**options) -> str:
    """Return what a console without colours gets of a timeline."""
    target = options.pop("console")
    with Screen("a run", console=target, **options) as screen:
        for each in timeline().frames:
            screen.show(each)
    return target.file.getvalue()


def test_a_log_gets_each_change_once() -> None:
    """Plain lines, no control characters, cells only where they changed."""
    said = shown(console=console(terminal=False), width=8)
    assert "\x1b" not in said
    assert said.count("cells used") == 4
    assert "     3 decode; no-slot\n     4 defrag; 1 cell moved\n" in said
    assert said.rstrip().endswith("0 #022")


def test_a_terminal_is_drawn_over() -> None:
    """Title, cells, numbers, legend and the last operations, in place."""
    said = shown(console=console(terminal=True), width=8)
    assert "\x1b[" in said
    for words in ("a run  operation 5", "1 failed", "1 cells moved", "# shared", "· free"):
        assert words in said


def test_speed_is_kept_and_moves_are_seen() -> None:
    """An operation takes its time, with its moves on the way inside of it."""
    slept: list[float] = []
    before = [n % 2 - 1 for n in range(48)]
    after = [0] * 24 + [FREE] * 24
    with Screen("x", console=console(terminal=True), speed=2, sleep=slept.append) as screen:
        screen.show(frame(1, before))
        moves = tuple(infer(tuple(before), tuple(after)))
        screen.show(frame(2, after, "defrag", moves=moves, moved=12))
    assert abs(sum(slept) - 1.0) < 1e-9
    assert len(slept) > 5 and min(slept) > 0
    slept.clear()
    with Screen("x", console=console(terminal=True), sleep=slept.append) as screen:
        screen.show(frame(1, before))
    assert not slept


def test_a_narrow_terminal_shows_all_of_a_large_cache() -> None:
    """Cells share places until the picture fits."""
    target = console(60, terminal=True)
    with Screen("x", console=target) as screen:
        screen.show(frame(1, [0] * 5000))
    said = target.file.getvalue()
    assert len(said.splitlines()) < 2 * 24  # drawn, and drawn once more at the end
    assert "cells to a place)" in " ".join(said.split())


def test_the_legend_names_sequences_then_shared_and_free() -> None:
    """Sequences first, then what is shared and free."""
    said = legend(Picture("", (1, 0, SHARED, FREE))).plain
    assert said.split("   ")[:4] == ["0 sequence 0", "1 sequence 1", "# shared", "· free"]


@given(st.permutations(range(-2, 14)))
def test_animation_shows_every_cell_at_each_step(owners: list[int]) -> None:
    """With all moves done the cells are where they go; half way as many are there."""
    before = Picture("", tuple(owners))
    after = tuple(sorted(owners))
    moves = tuple(infer(before.owner, after))
    done, arrived = on_the_way(before, moves)
    used = [owner for owner in done.owner if owner != FREE]
    assert used == [owner for owner in after if owner != FREE]
    assert len(arrived) == sum(length for *_, length in moves)
