"""The verb trust: what fails is told by its status, and what was run by its command."""

from __future__ import annotations

import json

import pytest
from test_cli_run import cli

from pyllamakv.trust import document, leaks
from pyllamakv.trust.entry import Effort, Entry


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """Let a section find a leak where it is asked for ``bad``, and nothing else anywhere."""
    asked: list[Effort] = []

    def entries(effort: Effort, tick: object) -> list[Entry]:
        asked.append(effort)
        known = [Entry("leaks", "bad", {}, ("it leaks",)), Entry("leaks", "good", {})]
        return [entry for entry in known if effort.wants(entry.name)]

    monkeypatch.setattr(leaks, "entries", entries)
    return asked


def test_a_defect_is_a_status(efforts, capsys, tmp_path) -> None:
    """What passes ends with 0, a defect with 1, and both are written."""
    path = tmp_path / "RELIABILITY.md"
    code, out, _ = cli(capsys, "trust", "leaks", "--only", "good", "--write", path, "--json")
    assert (code, [each["name"] for each in json.loads(out)]) == (0, ["good"])
    code, out, said = cli(capsys, "trust", "leaks", "--write", path)
    assert code == 1
    assert "| bad | it leaks |" in out
    assert "leaks: 2 tried in 0 s, 1 lost or wrong\n" in said
    assert said.endswith("lost or wrong: 1\n  leaks, bad: it leaks\n")
    assert [entry.passed for entry in document.read(path)] == [True, False]


def test_the_command_is_the_one_that_measures_it_again(efforts, capsys) -> None:
    """Whatever decides what is tried stands in the line; what is as usual does not."""
    options = ("--seconds", "30", "--seed", "7", "--only", "good", "--jobs", "2")
    _, out, _ = cli(capsys, "trust", "leaks", *options)
    assert "`pyllamakv trust leaks --seconds 30 --seed 7 --jobs 2 --only good`" in out
    assert efforts == [Effort(30.0, 7, ("good",), 2)]
    _, out, _ = cli(capsys, "trust", "leaks", "--operations", 10)
    assert "`pyllamakv trust leaks --seconds 90 --operations 10`" in out
    assert efforts.pop() == Effort(90.0, operations=10)
    _, out, _ = cli(capsys, "trust", "leaks", "--only", "good")
    assert "`pyllamakv trust leaks --seconds 90 --only good`" in out


def test_nothing_tried_is_refused(efforts, capsys) -> None:
    """A name that no section or no entry has does not pass for a trial."""
    code, _, said = cli(capsys, "trust", "leeks")
    assert code and "there is no section 'leeks'" in said and not efforts
    code, _, said = cli(capsys, "trust", "leaks", "--only", "none")
    assert code and "nothing was tried" in said
