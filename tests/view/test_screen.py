"""Test the terminal view, which shows each operation, and plain text for log files."""

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
    """Return the output of a timeline on a console without colours."""
    target = options.pop("console")
    with Screen("a run", console=target, **options) as screen:
        for each in timeline().frames:
            screen.show(each)
    return target.file.getvalue()


def test_log_output_has_each_change_once() -> None:
    """The output has plain lines, no control characters, and cells only where they changed."""
    output = shown(console=console(terminal=False), width=8)
    assert "\x1b" not in output
    assert output.count("cells used") == 4
    assert "     3 decode; no-slot\n     4 defrag; 1 cell moved\n" in output
    assert output.rstrip().endswith("0 #022")


def test_terminal_output_is_drawn_in_place() -> None:
    """Title, cells, counts, legend and the last operations are redrawn in place."""
    output = shown(console=console(terminal=True), width=8)
    assert "\x1b[" in output
    for words in ("a run  operation 5", "1 failed", "1 cells moved", "# shared", "· free"):
        assert words in output


def test_playback_speed_includes_the_frames_of_moves() -> None:
    """An operation has its duration, which includes its moves."""
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
    """Several cells share a character until the drawing fits."""
    target = console(60, terminal=True)
    with Screen("x", console=target) as screen:
        screen.show(frame(1, [0] * 5000))
    output = target.file.getvalue()
    assert len(output.splitlines()) < 2 * 24  # drawn once, and again at the end
    assert "cells to a place)" in " ".join(output.split())


def test_the_legend_names_sequences_then_shared_and_free() -> None:
    """Sequences come first, then shared and free cells."""
    output = legend(Picture("", (1, 0, SHARED, FREE))).plain
    assert output.split("   ")[:4] == ["0 sequence 0", "1 sequence 1", "# shared", "· free"]


@given(st.permutations(range(-2, 14)))
def test_animation_shows_every_cell_at_each_step(owners: list[int]) -> None:
    """After n moves, n cells are at their destinations."""
    before = Picture("", tuple(owners))
    after = tuple(sorted(owners))
    moves = tuple(infer(before.owner, after))
    done, arrived = on_the_way(before, moves)
    used = [owner for owner in done.owner if owner != FREE]
    assert used == [owner for owner in after if owner != FREE]
    assert len(arrived) == sum(length for *_, length in moves)
