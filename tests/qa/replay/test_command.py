"""Test that the command compares policies, writes figures, and fails far below LRU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from pyllamakv.errors import UsageError
from qa import summary
from qa.bench.figure import Figure
from qa.replay import command, replay_figures
from qa.replay.policy_replay import ReplayResult, replay

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("--agents", "4", "--shifting", "0", "--capacity", "20")


def run(*words: str, status: int = 0) -> str:
    """Run the command and return its output."""
    made = CliRunner().invoke(command.app, [*QUICK, *words])
    assert made.exit_code == status, made.output
    return made.output


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a trace of three chats with two turns each."""
    monkeypatch.delenv(command.VARIABLE, raising=False)
    path = tmp_path / "chats.jsonl"
    rows = [[0, 10 * n, 10 * n + 1] + [10 * n + 2] * turn for turn in (0, 1) for n in (1, 2, 3)]
    path.write_text("".join(json.dumps({"hash_ids": row}) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.slow
def test_policies_are_compared_with_lru_and_the_bound(trace: Path) -> None:
    """LRU is always included; the trace may be named by the environment."""
    text = run("adaptive")
    assert "| 20 % | 278 | lru | " in text
    assert "| 20 % | 278 | adaptive | " in text
    assert "agents, unlimited | 100.00% of the possible reuse | >= 99% | met |" in text
    assert "chats" not in text
    assert "`python -m qa replay adaptive --capacity 20 --agents 4 --shifting 0`" in text
    failed = CliRunner().invoke(command.app, ["--requests", "3"])
    assert isinstance(failed.exception, UsageError)
    text = run("lru", "--trace", str(trace), "--requests", "5", "--skip", "1")
    assert "chats, unlimited" in text
    assert "5 requests, 10 unique cells of 512 tokens" in text
    assert "--trace chats.jsonl --requests 5 --skip 1" in text
    assert str(trace.parent) not in text


def test_the_trace_may_be_named_by_a_variable(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is JSON; without a limit, each chat reuses its first turn or the system prompt."""
    monkeypatch.setenv(command.VARIABLE, str(trace))
    figures = {each["name"]: each["data"] for each in json.loads(run("lru", "--json"))}
    assert figures["chats, unlimited"] == {"reused": 11, "possible": 11, "prompts": 21}
    assert figures["chats, 20 %, `lru`"]["capacity"] == 4


def test_a_default_below_lru_fails(
    trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The figures are still written."""

    def worse(requests: list, capacity: int, policy: str, **options: object) -> ReplayResult:
        found = replay(requests, capacity, policy, **options)
        lost = found.reused if policy == "adaptive" and found.evictions else 0
        return ReplayResult(found.prompts, found.reused - lost, found.evictions)

    monkeypatch.setattr(replay_figures, "replay", worse)
    path = tmp_path / "figures.json"
    run("adaptive", "--write", str(path), status=1)
    found = summary.read(path, Figure)
    assert [each.name for each in found if each.met is False] == [
        "agents, 20 %, `adaptive` (default)"
    ]


def test_small_caches_of_a_trace_have_their_own_targets(
    trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Generated traffic has the usual one; both are stored, with the share of the bound."""
    monkeypatch.setattr(replay_figures, "LEAST_OF_TRACE", {20: 1.4})
    path = tmp_path / "figures.json"
    run("adaptive", "--trace", str(trace), "--write", str(path), "--json", status=1)
    found = {each.name: each for each in summary.read(path, Figure)}
    assert found["chats, 20 %, `adaptive` (default)"].target == ">= 1.4 x LRU"
    assert found["chats, 20 %, `adaptive` (default)"].met is False
    generated = found["agents, 20 %, `adaptive` (default)"]
    assert (generated.target, generated.met) == (">= 0.98 x LRU", True)
    assert generated.value.endswith("of the bound")
    assert generated.data["lru"] <= generated.data["bound"]
