"""The examples run as they stand, and what they print means what they say."""

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
    """Run an example in a process of its own, as a reader would, and return what it prints."""
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
    """Return the numbers that a pattern finds, which must be there."""
    found = re.search(pattern, text)
    assert found, f"{pattern} not in\n{text}"
    return [int(each) for each in found.groups()]


def test_each_example_is_tested() -> None:
    """No script lies here that no test runs."""
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in text


@pytest.mark.slow
def test_two_chats(stock, patched) -> None:
    """The system prompt is decoded once, and stands in the cache once."""
    said = run("two_chats")
    (head,) = numbers(r"system prompt: (\d+) cells", said)
    used, apart = numbers(r"(\d+) cells in use; without sharing (\d+)", said)
    assert apart - used >= head
    for chat in ("boat", "dog"):
        known, asked = numbers(rf"round 1, {chat}: (\d+) of (\d+) tokens cached", said)
        assert known == head < asked
        again, longer = numbers(rf"round 2, {chat}: (\d+) of (\d+) tokens cached", said)
        assert again > asked and longer > again


@pytest.mark.slow
def test_fork_and_compare(stock, patched) -> None:
    """Endings are ranked, and the prompt's cells are shared by all of them."""
    said = run("fork_and_compare")
    scores = [float(line.split()[0]) for line in said.splitlines()[:-1]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and scores[0] < 0
    used, shared, apart = numbers(r"(\d+) cells, (\d+) of them shared; without forks (\d+)", said)
    assert apart - used == 3 * shared > 0


@pytest.mark.slow
def test_a_trained_model_knows_the_right_ending(stock, patched, trained_model) -> None:
    """What the scores are for: the ending that makes sense comes first."""
    assert "sharp" in run("fork_and_compare", trained_model).splitlines()[0]


@pytest.mark.slow
def test_long_chat(stock, patched) -> None:
    """Far more tokens than cells, shifted in place, behind a head that stays."""
    said = run("long_chat")
    through, cells = numbers(r"(\d+) tokens went through (\d+) cells", said)
    shifts, again = numbers(r"(\d+) shifts, (\d+) tokens decoded again", said)
    assert through > 2 * cells and shifts == said.count(": shifted,") > 1 and again == 0
    assert "the head is still there: True" in said


@pytest.mark.slow
def test_fragment_fail_defragment(stock, patched) -> None:
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
def test_record_and_replay(stock, patched, tmp_path) -> None:
    """Stock replays the same; patched comes out otherwise at the row that failed alone."""
    from pyllamakv.scenarios import synthetic_models

    said = run("record_and_replay", synthetic_models.model("bytes"), tmp_path)
    wanted, free = numbers(r"no slot for (\d+) tokens with (\d+) cells free", said)
    assert wanted <= free
    on_stock, on_patched = said.split("patched:")
    assert "status was" not in on_stock
    assert on_patched.count("status was no-slot, now ok") == on_patched.count("row ") == 1
    assert (tmp_path / "stock.jsonl").is_file()
    assert "no-slot" in (tmp_path / "stock.svg").read_text(encoding="utf-8")
    drawn = (tmp_path / "patched.svg").read_text(encoding="utf-8")
    assert "no-slot" not in drawn and "cells moved" in drawn
    for side in ("stock", "patched"):  # the pictures of docs/pictures.md
        kept = EXAMPLES.parent / "docs" / "pictures" / f"{side}.svg"
        assert (tmp_path / f"{side}.svg").read_text(encoding="utf-8") == kept.read_text("utf-8")
