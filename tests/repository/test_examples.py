"""Test that the examples run unchanged, and that their output is correct."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.native


def run(name: str, *words: object) -> str:
    """Run an example in its own process and return its output."""
    environment = dict(os.environ, PYTHONPATH=str(EXAMPLES.parent), PYTHONIOENCODING="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLES / f"{name}.py", *map(str, words)],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def numbers(pattern: str, text: str) -> list[int]:
    """Return the numbers of a pattern that must match."""
    found = re.search(pattern, text)
    assert found, f"{pattern} not in\n{text}"
    return [int(each) for each in found.groups()]


def test_each_example_is_tested() -> None:
    """Each script has a test."""
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in text


@pytest.mark.slow
def test_two_chats_example_shares_the_system_prompt(stock, patched) -> None:
    """The system prompt is decoded once, and its cells are shared."""
    output = run("two_chats")
    (head,) = numbers(r"system prompt: (\d+) cells", output)
    used, apart = numbers(r"(\d+) cells in use; without sharing (\d+)", output)
    assert apart - used >= head
    for chat in ("boat", "dog"):
        known, asked = numbers(rf"round 1, {chat}: (\d+) of (\d+) tokens cached", output)
        assert known == head < asked
        again, longer = numbers(rf"round 2, {chat}: (\d+) of (\d+) tokens cached", output)
        assert again > asked and longer > again


@pytest.mark.slow
def test_fork_and_compare_example_shares_the_prompt(stock, patched) -> None:
    """Endings are ranked, and all of them share the cells of the prompt."""
    output = run("fork_and_compare")
    scores = [float(line.split()[0]) for line in output.splitlines()[:-1]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and scores[0] < 0
    used, shared, apart = numbers(r"(\d+) cells, (\d+) of them shared; without forks (\d+)", output)
    assert apart - used == 3 * shared > 0


@pytest.mark.slow
def test_trained_model_ranks_the_right_ending_first(stock, patched, trained_model) -> None:
    """The ending that makes sense has the best score."""
    assert "sharp" in run("fork_and_compare", trained_model).splitlines()[0]


@pytest.mark.slow
def test_long_chat_example_shifts_and_keeps_the_head(stock, patched) -> None:
    """Far more tokens than cells are decoded, shifted in place after a head that is kept."""
    output = run("long_chat")
    through, cells = numbers(r"(\d+) tokens went through (\d+) cells", output)
    shifts, again = numbers(r"(\d+) shifts, (\d+) tokens decoded again", output)
    assert through > 2 * cells and shifts == output.count(": shifted,") > 1 and again == 0
    assert "the head is still there: True" in output


@pytest.mark.slow
def test_fragmentation_example_fails_on_stock_only(stock, patched) -> None:
    """Stock fails, and decodes after a defragmentation; patched needs none."""
    on_stock, on_patched = run("fragment_fail_defragment").split("--- 0.3.9+patched")
    wanted, free = numbers(r"no slot for (\d+) tokens, although (\d+) are free", on_stock)
    assert wanted <= free
    assert numbers(r"defragmented: (\d+) cells moved", on_stock) == [64]
    assert "the decode defragmented the cache" in on_patched and "no slot" not in on_patched
    for side in (on_stock, on_patched):
        assert "fragmented: 128 of 256 cells used, 128 holes, largest 1" in side
        assert "decoded: 160 of 256 cells used, 1 hole, largest 96" in side
        assert "2" * 32 + "·" * 32 in side


@pytest.mark.slow
def test_record_and_replay_example_diverges_at_the_failed_row(stock, patched, tmp_path) -> None:
    """Stock replays the same; patched differs only at the failed row."""
    from pyllamakv.scenarios import synthetic_models

    output = run("record_and_replay", synthetic_models.model("bytes"), tmp_path)
    wanted, free = numbers(r"no slot for (\d+) tokens with (\d+) cells free", output)
    assert wanted <= free
    on_stock, on_patched = output.split("patched:")
    assert "status was" not in on_stock
    assert on_patched.count("status was no-slot, now ok") == on_patched.count("row ") == 1
    assert (tmp_path / "stock.jsonl").is_file()
    assert "no-slot" in (tmp_path / "stock.svg").read_text(encoding="utf-8")
    drawn = (tmp_path / "patched.svg").read_text(encoding="utf-8")
    assert "no-slot" not in drawn and "cells moved" in drawn
    for side in ("stock", "patched"):  # the drawings of docs/pictures.md
        kept = EXAMPLES.parent / "docs" / "pictures" / f"{side}.svg"
        assert (tmp_path / f"{side}.svg").read_text(encoding="utf-8") == kept.read_text("utf-8")
