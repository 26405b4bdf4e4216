"""Test `python -m qa stress`: the status shows failures, and the command repeats the run."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest

from pyllamakv.errors import NotBuilt, UsageError
from qa import SECTIONS, fuzzing, leaks, main, sanitizers, selection, servers, summary
from qa import random_operations as schedules
from qa.entry import Entry, StressOptions, Tick, skipped_entry


def cli(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[StressOptions]:
    """Replace sections: one finds a leak in the entry ``bad``."""
    asked: list[StressOptions] = []

    def entries(effort: StressOptions, tick: object) -> list[Entry]:
        asked.append(effort)
        known = [Entry("leaks", "bad", {}, ("it leaks",)), Entry("leaks", "good", {})]
        return [entry for entry in known if effort.wants(entry.name)]

    monkeypatch.setattr(leaks, "entries", entries)
    monkeypatch.setattr(leaks, "names", lambda: ("bad", "good"))
    return asked


def test_defect_exits_with_1(efforts, capsys, tmp_path) -> None:
    """Without a defect, the status is 0; both results are written."""
    path = tmp_path / "reliability.json"
    code, out, _ = cli(capsys, "stress", "leaks", "--only", "good", "--write", path, "--json")
    assert (code, [each["name"] for each in json.loads(out)]) == (0, ["good"])
    code, out, message = cli(capsys, "stress", "leaks", "--write", path)
    assert code == 1
    assert "| bad | it leaks |" in out
    assert re.search(r"leaks: ran 2 in \d+ s, defects: 1\n", message)
    assert message.endswith("defects: 1\n  leaks, bad: it leaks\n")
    assert [entry.passed for entry in summary.read(path, Entry)] == [True, False]


def test_printed_command_contains_the_options_of_the_run(efforts, capsys) -> None:
    """It contains every option that changes the run, and no default."""
    options = ("--seconds", "30", "--seed", "7", "--only", "good")
    _, out, _ = cli(capsys, "stress", "leaks", *options)
    assert "`python -m qa stress leaks --seconds 30 --seed 7 --only good`" in out
    assert efforts == [StressOptions(30.0, 7, ("good",))]
    _, out, _ = cli(capsys, "stress", "leaks", "--operations", 10)
    assert "`python -m qa stress leaks --seconds 90 --operations 10`" in out
    assert efforts.pop() == StressOptions(90.0, operations=10)
    _, out, _ = cli(capsys, "stress", "leaks", "--only", "good")
    assert "`python -m qa stress leaks --seconds 90 --only good`" in out


@pytest.mark.slow
def test_brackets_and_control_characters_in_progress_are_escaped(
    efforts, capsys, monkeypatch
) -> None:
    """Control characters do not reach the terminal, and progress continues."""
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)

    def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
        tick("test_paths[/x]")
        # Several times as long as between two updates.
        time.sleep(0.5)
        return [Entry("leaks", "good", {})]

    monkeypatch.setattr(leaks, "entries", entries)
    assert cli(capsys, "stress", "leaks")[0] == 0
    assert not broken


def test_unknown_names_are_refused_before_the_first_run(efforts, capsys) -> None:
    """The error has the closest names, and no result is printed."""
    for words, message in (
        (("leeks",), "there is no section 'leeks'"),
        (
            ("leaks", "--only", "goood"),
            "--only 'goood' matches nothing in leaks: did you mean good?",
        ),
        (("leaks", "--only", "x"), "--only 'x' matches nothing in leaks: bad, good"),
        (("leaks", "fuzzing", "--only", "good", "--only", "gugf"), "leaks, fuzzing: did you mean"),
        (
            ("random_operations", "--only", "0.3.99"),
            "matches nothing in random_operations: did you mean",
        ),
    ):
        code, out, error = cli(capsys, "stress", *words)
        assert code == UsageError.exit_code and message in error and not out, error
    assert not efforts


def test_a_section_has_the_names_that_are_its_own(efforts, capsys, monkeypatch) -> None:
    """Sections without any named entry are omitted."""
    for section in SECTIONS:
        if section != "leaks":
            monkeypatch.setattr(selection.module(section), "entries", None)
    asked: list[StressOptions] = []
    for section in (schedules, servers):  # both have an entry per release
        monkeypatch.setattr(section, "entries", lambda effort, tick: asked.append(effort) or [])
    assert cli(capsys, "stress", "--only", "good")[0] == 0
    assert cli(capsys, "stress", "--only", "good", "--only", "0.3.9")[0] == 0
    assert cli(capsys, "stress", "--only", "good", "--only", "path:tree")[0] == 0
    assert [each.only for each in efforts] == [("good",)] * 3
    assert [each.only for each in asked] == [("0.3.9",), ("0.3.9",), ("path:tree",)]


@pytest.mark.slow
@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "random_operations"])
def test_every_section_has_names(section: str) -> None:
    """Each can be selected by --only; those of schedules are releases."""
    names = selection.module(section).names()
    assert names and len(set(names)) == len(names)
    assert all(selection.select((), [name])[section] == (name,) for name in names)


def test_run_without_any_test_is_an_error(efforts, capsys, monkeypatch) -> None:
    """If nothing is built, for example, the run does not pass."""
    monkeypatch.setattr(leaks, "entries", lambda *_: [])
    code, out, message = cli(capsys, "stress", "leaks", "--only", "good")
    assert code and "nothing was tested" in message and not out


@pytest.mark.parametrize("error", [NotBuilt("it is not there"), ZeroDivisionError("ours")])
def test_failed_section_keeps_the_other_sections(
    efforts, capsys, monkeypatch, tmp_path: Path, error: Exception
) -> None:
    """The other sections run, all findings are printed, and the exit status is the error's."""
    path = tmp_path / "reliability.json"

    def breaks(effort: StressOptions, tick: object) -> list[Entry]:
        raise error

    monkeypatch.setattr(fuzzing, "entries", breaks)
    monkeypatch.setattr(sanitizers, "entries", lambda *_: [Entry("sanitizers", "fine", {})])
    words = ("stress", "sanitizers", "fuzzing", "leaks", "--write", path)
    code, _, _ = found = cli(capsys, *words)
    if isinstance(error, NotBuilt):
        assert code == NotBuilt.exit_code
        assert found[2].endswith("NotBuilt: it is not there\n")
    else:
        assert code == 128
        assert "Traceback" in found[2]
    assert "| fine | none |" in found[1] and "| bad | it leaks |" in found[1]
    assert f"fuzzing: failed with {type(error).__name__}\n" in found[2]
    assert "leaks, bad: it leaks\n" in found[2]
    assert [entry.name for entry in summary.read(path, Entry)] == ["fine", "bad", "good"]


def test_an_interrupted_run_prints_its_results(efforts, capsys, monkeypatch) -> None:
    """An interrupt keeps the results of completed sections."""

    def interrupted(effort: StressOptions, tick: object) -> list[Entry]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sanitizers, "entries", interrupted)
    code, out, _ = cli(capsys, "stress", "leaks", "sanitizers")
    assert code == 130 and "| bad | it leaks |" in out


def test_invalid_output_file_is_refused_before_the_run(efforts, capsys, tmp_path: Path) -> None:
    """It is a directory, has another suffix, or was written by another program."""
    (tmp_path / "odd.json").write_text("[]", encoding="utf-8")
    strange = '{"results": [{"section": "leeks", "name": "x", "row": {}, "defects": []}]}'
    (tmp_path / "old.json").write_text(strange, encoding="utf-8")
    for name in (".", "R.md", "odd.json/R.json", "odd.json", "old.json"):
        code, out, message = cli(capsys, "stress", "leaks", "--write", tmp_path / name)
        assert code == UsageError.exit_code and message.startswith("UsageError: "), (name, message)
        assert not out
    assert not efforts


def test_a_skipped_entry_replaces_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    """A skipped entry keeps the stored result; alone it is an error with the reason."""
    path = tmp_path / "reliability.json"
    lacks = False

    def entries(effort: StressOptions, tick: object) -> list[Entry]:
        made = [Entry("fuzzing", name, {"inputs": "9"}, data={"n": 9}) for name in ("lock", "wire")]
        made = [made[0], skipped_entry("fuzzing", "wire", "no clang")] if lacks else made
        return [each for each in made if effort.wants(each.name)]

    monkeypatch.setattr(fuzzing, "entries", entries)
    assert cli(capsys, "stress", "fuzzing", "--write", path)[0] == 0
    lacks = True
    code, out, message = cli(capsys, "stress", "fuzzing", "--write", path)
    assert code == 0 and "skipped: no clang |" in out
    assert re.search(r"ran 1 in \d+ s, defects: none; wire skipped: no clang\n", message)
    assert [each.row["inputs"] for each in summary.read(path, Entry)] == ["9", "9"]
    code, _, message = cli(capsys, "stress", "fuzzing", "--only", "wire")
    assert code and "nothing was tested: wire skipped: no clang" in message
