"""Test progress on a stderr that is not a terminal: a short log with regular lines."""

from __future__ import annotations

import re
import time

import pytest
from cli_kit import cli

from pyllamakv.cli import progress_bar


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat after a fraction of a second."""
    assert progress_bar.INTERVAL <= 30
    monkeypatch.setattr(progress_bar, "INTERVAL", 0.2)


@pytest.mark.slow
def test_long_step_prints_a_line_per_interval(capsys) -> None:
    """A step without reports, or with numbers only, prints a line with its state per interval."""
    with progress_bar.progress() as report:
        time.sleep(0.5)
        report("compiling", 0, None)
        for done in range(5):
            report("compiling", done, 9)
            time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"working, \d+ s", lines[0])
    assert "compiling" in lines
    later = [line for line in lines if re.fullmatch(r"compiling \(\d of 9\), \d+ s", line)]
    assert 2 <= len(later) <= 5
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_short_step_prints_one_line(capsys) -> None:
    """Many numbers in a short time print nothing."""
    with progress_bar.progress() as report:
        report("fetching", 0, None)
        for done in range(100):
            report("fetching", done, 100)
    assert capsys.readouterr().err == "fetching\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (("build", "0.3.9", "--stock"), "pyllamakv.building.build", "build"),
        (("upstream", "fetch", "0.3.9"), "pyllamakv.source.fetch", "fetch"),
        (("check", "0.3.9"), "pyllamakv.verification.check", "check"),
        (("matrix", "run", "0.3.9"), "pyllamakv.verification.matrix", "run"),
        (("matrix", "bisect", "0.3.8", "0.3.9"), "pyllamakv.verification.matrix", "run"),
    ],
)
def test_long_commands_print_progress_without_reports(
    words: tuple[str, ...], module: str, name: str, capsys, monkeypatch, tmp_path
) -> None:
    """They do even if the work itself reports nothing."""
    from pyllamakv.errors import UsageError

    def slow(*_args: object, **_options: object) -> None:
        time.sleep(0.6)
        raise UsageError("over")

    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(f"{module}.{name}", slow)
    code, _, err = cli(capsys, *words)
    assert code == 2
    assert len(re.findall(r"^working, \d+ s$", err, re.MULTILINE)) >= 2
