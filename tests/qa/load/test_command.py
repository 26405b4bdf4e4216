"""Test that the command prints, writes and draws, and fails if patched loses a request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from pyllamakv.errors import NotBuilt
from pyllamakv.scenarios import synthetic_models
from qa.load import command, load_cells
from qa.load.load_result import LoadResult, RequestTiming

if TYPE_CHECKING:
    from collections.abc import Callable

    from qa.load.load_cells import LoadCell


@pytest.fixture
def losing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Replace runs; return the set of systems that lose their requests."""
    systems: set[str] = set()

    def measure(cell: LoadCell, tick: Callable[[int], None]) -> LoadResult:
        tick(1)
        error = "gone" if cell.system in systems else ""
        return LoadResult((RequestTiming(0.0, 1.0, 2.0, 3, error),), 1.0)

    model = tmp_path / "stories.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setenv(synthetic_models.VARIABLE, str(model))
    monkeypatch.setattr(load_cells, "find_server", lambda spec: spec)
    monkeypatch.setattr(load_cells.LoadCell, "read", lambda _cell: None)
    monkeypatch.setattr(load_cells.LoadCell, "measure", measure)
    return systems


def run(*words: str, status: int = 0) -> str:
    """Run the command and return its output."""
    made = CliRunner().invoke(command.app, list(words))
    assert made.exit_code == status, made.output
    return made.stdout


@pytest.mark.slow
def test_load_command_writes_table_json_and_picture(losing: set[str], tmp_path: Path) -> None:
    """A table, JSON and a picture of stock beside patched."""
    losing.add("stock")
    picture, file = tmp_path / "run.svg", tmp_path / "figures.json"
    words = ("0.3.9", "--workload", "fits", "--requests", "1", "--clients", "8")
    text = run(*words, "--picture", str(picture), "--write", str(file))
    assert "| stock | 8 | 1 | 1 |" in text
    assert "| patched | 8 | 1 | 0 |" in text
    assert "`python -m qa load 0.3.9 --workload fits --clients 8 --requests 1 --rate 20" in text
    assert "1 thread, stories.gguf" in text
    assert "stock: 0 of 1 requests answered, 1 lost" in picture.read_text("utf-8")
    results = json.loads(file.read_text("utf-8"))["results"]
    assert results[0]["name"] == "stock, 8 clients"
    assert results[0]["value"] == "1 of 1 requests lost"
    assert results[1]["name"] == "patched, 8 clients"
    assert results[1]["data"]["requests"] == 1
    cells = json.loads(run(*words, "--system", "patched", "--json"))
    assert [(each["system"], each["clients"], each["cpu_seconds"]) for each in cells] == [
        ("patched", 8, 1.0)
    ]
    options = ("requests", "rate", "threads", "model")
    assert [cells[0][name] for name in options] == [1, 20.0, 1, "stories.gguf"]


def test_load_figures_have_the_date_of_their_cells(
    losing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored results have another date than today, except with --fresh."""
    assert not losing
    stored = LoadResult((RequestTiming(0.0, 1.0, 2.0, 3),), 1.0, day="2026-01-02")
    monkeypatch.setattr(load_cells.LoadCell, "read", lambda _cell: stored)
    words = ("--workload", "fits", "--system", "patched")
    assert "Measured 2026-01-02, " in run(*words)
    assert "Measured 2026-01-02, " not in run(*words, "--fresh")


def test_lost_request_on_patched_fails_the_command(losing: set[str]) -> None:
    """Requests that stock loses are a result."""
    losing.update(load_cells.SYSTEMS)
    run("--system", "patched", "--workload", "fits", status=1)
    run("--system", "batcher", "--workload", "fits", status=1)
    run("--system", "stock", "--workload", "fits")


def test_a_path_of_the_user_is_not_in_results() -> None:
    """Neither that of the model nor that of the trace."""
    plan = load_cells.LoadPlan(
        ("0.3.9",), ("trace",), (4,), model="/home/a/m.gguf", trace=Path("/home/a/t.jsonl")
    )
    assert command._command(plan).endswith("--rounds 1 --model m.gguf --trace t.jsonl")


def test_invalid_load_arguments_are_refused_before_the_first_cell(
    losing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell would take minutes."""
    assert not losing

    def find_server(spec: str) -> None:
        if spec.startswith("0.3.16"):
            raise NotBuilt(f"the server of {spec} is not built")

    monkeypatch.setattr(load_cells, "find_server", find_server)
    monkeypatch.setattr(load_cells.LoadCell, "measure", None)
    for words, reason in (
        (("--workload", "fits", "--workload", "shfit"), "no workload 'shfit'"),
        (("--workload", "fits", "--workload", "trace"), "needs --trace"),
        (("0.3.9", "0.3.16"), "0.3.16.stock is not built"),
    ):
        made = CliRunner().invoke(command.app, list(words))
        assert re.search(reason, str(made.exception))


def test_unknown_systems_are_refused() -> None:
    """The error lists the known ones."""
    made = CliRunner().invoke(command.app, ["--system", "vllm"])
    assert "choose from stock, patched, batcher" in str(made.exception)
