"""Test `python -m qa stress servers`: one release per era, only with built servers."""

from __future__ import annotations

from typing import Any

import pytest

from pyllamakv.errors import NotBuilt
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.server.server_check import ServerCheck
from pyllamakv.server.server_scenarios import SCENARIOS
from pyllamakv.verification.verdict import Pair, Verdict, decide
from qa import servers, summary
from qa.entry import Entry, StressOptions

PASSED, RETRIES = Outcome("pass"), Outcome("fail", "claim", "5 batches were split")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace servers of 0.3.9 by fakes: stock splits batches in each fix scenario."""
    made: list[tuple[str, str]] = []

    def find_server(spec: str) -> None:
        if not spec.startswith("0.3.9+"):
            raise NotBuilt(f"the server of {spec} is not built")

    def check_server(release: str, *, scenarios: tuple[str, ...]) -> ServerCheck:
        (name,) = scenarios
        made.append((release, name))
        kind = next(each.kind for each in SCENARIOS if each.id == name)
        stock = RETRIES if kind == "fix" else PASSED
        pair = Pair(name, kind, "-np 4", stock, PASSED)
        notes = {(name, "stock"): {"retries": 5}, (name, "patched"): {"requests": 3}}
        return ServerCheck(release, decide([pair]), (pair,), notes, {"stock": "id"})

    monkeypatch.setattr(servers, "find_server", find_server)
    monkeypatch.setattr(servers.server_check, "check_server", check_server)
    return made


def entries(**options: Any) -> list[Entry]:
    return servers.entries(StressOptions(**options), lambda _: None)


def test_built_servers_are_verified(runs: list[tuple[str, str]]) -> None:
    """One release per era since 0.3.6; the others name the command that builds them."""
    found = {each.name: each for each in entries(seconds=900.0)}
    assert {*found} >= {"0.3.8", "b4980", "0.3.9", "0.3.14", "0.3.16"}
    assert not any(name.startswith("node-llama-cpp") for name in found)
    assert {release for release, _ in runs} == {"0.3.9"}
    assert not found["0.3.16"].ran
    assert found["0.3.16"].skip_reason == (
        "skipped: build its servers: pyllamakv build 0.3.16 --server"
    )
    count = len(SCENARIOS)
    done = found["0.3.9"]
    assert done.passed and done.ran
    assert done.row["verdict"] == "needed"
    assert (done.row["era"], done.row["scenarios"]) == ("unified", f"{count} of {count}")
    assert done.row["requests"] == str(3 * count)
    assert (done.row["retries on stock"], done.row["on patched"]) == (str(5 * count), "0")
    assert "server-parallel" in done.row["stock fails"]
    assert done.row["patched fails"] == "none"


def test_a_short_run_starts_with_fixes(runs: list[tuple[str, str]]) -> None:
    """A long run continues with the others; a started scenario is completed."""
    entries(seconds=900.0, only=("0.3.9",))
    kinds = {each.id: each.kind for each in SCENARIOS}
    assert "".join("fx"[kinds[name] != "fix"] for _, name in runs).lstrip("f").strip("x") == ""
    runs.clear()
    (done,) = entries(seconds=0.0, only=("0.3.9",))
    assert [name for _, name in runs] == ["server-context-shift"]
    assert done.row["scenarios"] == f"1 of {len(SCENARIOS)}"


def test_a_bad_verdict_is_a_defect() -> None:
    """It has the reason."""
    pair = Pair("server-x", "fix", "-np 4", PASSED, RETRIES)
    found = servers.entry("0.3.9", [ServerCheck("0.3.9", decide([pair]), (pair,))], 1)
    assert found.row["patched fails"] == "server-x"
    assert len(found.defects) == 1
    assert found.defects[0].startswith("harmful: ")


def test_skipped_scenarios_are_no_runs() -> None:
    """Scenarios that the release cannot run, or whose feature is missing, do not count."""
    pairs = (
        Pair("server-x", "fix", "-np 4", RETRIES, PASSED),
        Pair("server-y", "guard", "-np 4", Outcome("skip"), Outcome("skip")),
        Pair("server-z", "feature", "-np 4", Outcome("absent"), Outcome("absent")),
    )
    found = servers.entry("0.3.9", [ServerCheck("0.3.9", decide(pairs), pairs)], 3)
    assert found.row["scenarios"] == "1 of 3, 2 skipped"


def test_the_document_has_the_recorded_verdicts() -> None:
    """docs/server.md has a row with the verdict of each verified release."""
    text = (summary.ROOT / "docs" / "server.md").read_text("utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    rows = [row for row in cells if len(row) == 5 and row[2] in list(Verdict)]
    kept = summary.read(summary.RELIABILITY, Entry)
    columns = ("era", "verdict", "stock fails", "patched fails")
    recorded = [
        [each.name, *(each.row[column] for column in columns)]
        for each in kept
        if each.section == "servers"
    ]
    assert recorded
    assert sorted(rows) == sorted(recorded)
