"""Progress on a stderr that is no terminal: a log that stays short and shows life."""

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
def test_a_long_step_is_repeated(capsys) -> None:
    """A step that reports no more, or only numbers, prints a line per interval with its state."""
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


def test_a_short_step_is_one_line(capsys) -> None:
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
        (("bisect", "0.3.8", "0.3.9"), "pyllamakv.verification.matrix", "run"),
    ],
)
def test_every_long_command_shows_life(
    words: tuple[str, ...], module: str, name: str, capsys, monkeypatch, tmp_path
) -> None:
    """Even where the work itself reports nothing."""
    from pyllamakv.errors import UsageError

    def slow(*_args: object, **_options: object) -> None:
        time.sleep(0.6)
        raise UsageError("over")

    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(f"{module}.{name}", slow)
    code, _, err = cli(capsys, *words)
    assert code == 2
    assert len(re.findall(r"^working, \d+ s$", err, re.MULTILINE)) >= 2
