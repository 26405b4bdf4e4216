"""The verb trust: what fails is told by its status, and what was run by its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_run import cli

from pyllamakv.trust import document, fuzzing, leaks
from pyllamakv.trust.entry import Effort, Entry
from pyllamakv.trust.fuzzing.outcome import Outcome, entry


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


def test_fuzzing_adds_up_in_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    """Another seed is added to what stands there; the same one would count the same twice."""
    path = tmp_path / "RELIABILITY.md"

    def entries(effort: Effort, tick: object) -> list[Entry]:
        made = Outcome(inputs=100, seconds=1.0, cpu=2.0, coverage=3, total=4)
        return [entry(name, made, effort.seed) for name in ("lock", "wire") if effort.wants(name)]

    monkeypatch.setattr(fuzzing, "entries", entries)
    more = ("trust", "fuzzing", "--add", "--write", path, "--seed")
    assert cli(capsys, *more, 1)[0] == 0
    assert cli(capsys, *more, 2, "--only", "wire")[0] == 0
    assert [each.row["inputs"] for each in document.read(path)] == ["100", "200"]
    code, _, said = cli(capsys, *more, 2)
    assert code and "seed 2 was tried before on wire: choose another" in said
    assert cli(capsys, *more, 2, "--only", "lock")[0] == 0
    assert [each.row["seed"] for each in document.read(path)] == ["1, 2", "1, 2"]
    code, _, said = cli(capsys, "trust", "--add", "--write", path)
    assert code and "--add is for fuzzing" in said
