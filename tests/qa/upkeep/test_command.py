"""Test that the command writes the page, prints the sample, and fails for a broken tree."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner
from upkeep_kit import sandbox

from qa.upkeep import command, sample

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: str, status: int = 0) -> str:
    """Run the command and return its output."""
    made = CliRunner().invoke(command.app, list(words))
    assert made.exit_code == status, made.output
    return made.stdout


@pytest.mark.slow
def test_page_sample_and_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 1 after a broken carry, unless its state is not in the sample."""
    sandbox(tmp_path, monkeypatch)
    assert run("--sample", "2").splitlines() == ["0.3.2 2026-08-02 forward"]
    states = json.loads(run("--json", "--sample", "1"))
    assert [one["release"] for one in states["sample"]] == ["0.3.2"]
    assert {one["good"] for one in states["states"]} == {True, False}
    made = SimpleNamespace(verdict="harmful", exit_code=1, reason="wrong data")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))
    monkeypatch.setattr(sample, "_fetch_again", lambda *_: None)
    monkeypatch.setattr(sample, "_build", lambda *_: None)
    assert run("--state", "0.3.2").splitlines() == ["0.3.2 2026-08-02 forward"]
    file = tmp_path / "upkeep.md"
    run("--write", str(file), "--sample", "1", "--verify", status=1)
    assert "| 0.3.2 | 2026-08-02 | forward | fix from 0.3.1 | broken-carry |" in file.read_text()
    assert file.read_text() == run()
    monkeypatch.setattr(sample, "draw", lambda *_: [])
    run("--write", str(file), "--sample", "1", "--verify")
    assert "broken-carry" not in file.read_text()
    run("--write", str(file), "--sample", "1")
    assert "broken-carry" not in file.read_text()
    wider = file.read_text().replace("| all | all ports | 4 |", "| all | all ports | 5 |")
    file.write_text(wider)
    refused = CliRunner().invoke(command.app, ["--write", str(file)])
    assert "5 states, and 4 are fetched here" in str(refused.exception)
    assert file.read_text() == wider
