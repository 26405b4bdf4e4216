"""Test the output of the command `check` for users, other programs and git bisect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from check_kit import SOME, CheckSandbox, make
from fakes.simulated import SimulatedNative

from pyllamakv.cli import main
from pyllamakv.errors import CommandFailed
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.server import server_check
from pyllamakv.server.server_check import ServerCheck
from pyllamakv.source import verified
from pyllamakv.verification import check_report
from pyllamakv.verification.verdict import Pair, decide


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckSandbox:
    """Return a fake library whose stock fails and whose patched side passes."""
    return make(monkeypatch, tmp_path)


def run_cli(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main.main(["check", *words])
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err


def names(*chosen: str) -> list[str]:
    return [word for name in chosen for word in ("--scenario", name)]


def test_the_command_prints_a_table_and_the_verdict(world: CheckSandbox, capsys) -> None:
    """In 80 columns: the differences, and the verdict as the last line, not wrapped."""
    code, out, _ = run_cli(capsys, "0.3.9", *names(*SOME))
    assert code == 0
    assert "fragmented" in out and "fork-then-defrag" not in out
    assert "1 scenario with equal results on stock and patched; -v lists them" in out
    assert "holes" not in out
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80
    last = out.strip().splitlines()[-1]
    assert last.startswith("needed: stock fails ")
    assert last.endswith("patched passes all")


def test_verbose_check_lists_every_scenario(world: CheckSandbox, capsys) -> None:
    """Every scenario with -v; the cells with --pictures."""
    _, out, _ = run_cli(capsys, "0.3.9", "-v", *names(*SOME))
    assert "fork-then-defrag" in out and "-v lists" not in out
    _, out, _ = run_cli(capsys, "0.3.9", "--pictures", *names(*SOME))
    assert "128 of 256 cells used, 128 holes" in out


def test_the_newest_verified_release_is_the_default(world: CheckSandbox, capsys) -> None:
    """`make check` prints its release."""
    _, out, _ = run_cli(capsys, "--json", *names("fragmented"))
    assert json.loads(out)["release"] == verified.newest().name


@pytest.mark.slow
def test_json_has_pictures_on_request(world: CheckSandbox, capsys) -> None:
    """They are the largest part; without them a scenario takes a few kilobytes."""
    _, small, _ = run_cli(capsys, "0.3.9", "--json", *names("fragmented"))
    _, large, _ = run_cli(capsys, "0.3.9", "--json", "--pictures", *names("fragmented"))
    found, drawn = json.loads(small)["results"]["stock"], json.loads(large)["results"]["stock"]
    assert all(one["pictures"] for one in drawn)
    assert not any("pictures" in one or "timelines" in one for one in found)
    assert len(small) < 40_000 < len(large)


def test_the_command_prints_json_and_junit(world: CheckSandbox, capsys, tmp_path: Path) -> None:
    """The JSON on stdout is complete; JUnit fails only for defects of patched."""
    file = tmp_path / "junit.xml"
    code, out, _ = run_cli(capsys, "0.3.9", "--json", "--junit", str(file), *names(*SOME))
    found = json.loads(out)
    assert (code, found["verdict"], found["exit_code"]) == (0, "needed", 0)
    assert set(found["results"]) == {"stock", "patched"}
    root = ET.parse(file).getroot()
    assert [suite.get("failures") for suite in root] == ["0", "0", "0"]
    assert len(root[0]) == len(found["results"]["stock"])


def test_exit_codes_of_check_are_those_of_git_bisect(world: CheckSandbox, capsys) -> None:
    """1 for bad, 125 for skip, 128 for an error of the harness, 2 for a usage error."""
    world.make = lambda side: SimulatedNative()
    assert run_cli(capsys, "0.3.9", *names(*SOME))[0] == 1
    world.build_stock = CommandFailed("x", ["ninja"], 1, "log")
    assert run_cli(capsys, "0.3.9", *names(*SOME))[0] == 125
    world.build_stock = ZeroDivisionError("oops")
    code, _, err = run_cli(capsys, "0.3.9", *names(*SOME))
    assert code == 128
    assert "oops" in err
    assert run_cli(capsys, "0.3.9", "--scenario", "fragmentd")[0] == 2


def test_summary_counts_the_outcomes_of_a_side() -> None:
    """The outcomes of a side's settings are counted."""
    from pyllamakv.scenarios.outcome import Outcome

    good, skip, lost = Outcome("pass"), Outcome("skip"), Outcome("fail", "lost")
    assert check_report.summary([good, skip]) == "passes 1"
    assert check_report.summary([good, lost]) == "fails 1/2: lost"
    assert check_report.summary([skip]) == "skipped"
    assert check_report.summary([None]) == "not patched"
    assert check_report.summary([Outcome("absent")]) == "absent 1/1"


def test_check_of_servers_prints_both_sides_with_counts(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Both sides of each scenario have counts; -v prints the log of a server that ended."""
    dead = Outcome(
        "fail", "crash", "llama-server was ended by SIGABRT: " + 80 * "x" + "\n  more log"
    )
    pairs = (Pair("server-x", "fix", "-np 4", dead, Outcome("pass")),)
    counts = {("server-x", "patched"): {"requests": 40, "retries": 0}}
    asked: list[tuple[str, ...]] = []

    def check_server(release: str, **options: Any) -> ServerCheck:
        asked.append((release, *options["series"], *options["scenarios"]))
        return ServerCheck(release, decide(pairs), pairs, counts)

    monkeypatch.setattr(server_check, "check_server", check_server)
    words = ("0.3.9", "--server", "--series", "full-defrag", "--scenario", "server-x")
    code, out, _ = run_cli(capsys, *words)
    assert (code, asked) == (0, [("0.3.9", "full-defrag", "server-x")])
    assert out.splitlines() == [
        "server-x                fix      needed",
        "  stock    crash: llama-server was ended by SIGABRT: " + 26 * "x" + "…",
        "  patched  pass (40 requests)",
        "needed: stock fails 1 of 1 runs, patched passes all",
    ]
    shown = run_cli(capsys, *words, "-v")[1]
    assert 80 * "x" in shown and "more log" in shown
    assert json.loads(run_cli(capsys, *words, "--json")[1])["verdict"] == "needed"


def test_servers_refuse_options_of_the_library(capsys) -> None:
    """Every such option is refused."""
    code, _, err = run_cli(capsys, "0.3.9", "--server", "--quick")
    assert code == 2
    assert "--server has only the options" in err
