"""Test that two watches of a release are timed, kept and written into the page."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner
from upkeep_kit import ONE, sandbox

from pyllamakv.errors import HarnessError
from pyllamakv.source import spec_resolver
from pyllamakv.source.git_command import git
from qa.upkeep import command, page, watching

if TYPE_CHECKING:
    Watches = list[list[str]]


@pytest.fixture
def watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watches:
    """Replace the watch; return the files of both commits, and of the data directory, for each."""
    bench = sandbox(tmp_path, monkeypatch)
    monkeypatch.setattr(spec_resolver, "resolve", bench.releases.__getitem__)
    found: Watches = []

    def run(words: Any, *, env: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
        remote = Path(next(word for word in words if word.startswith("git:"))[4:].partition("@")[0])
        data = Path(env["PYLLAMAKV_HOME"])
        kept = (path.name for path in data.glob("*"))
        trees = [git(remote, "ls-tree", "-r", "--name-only", ref) for ref in ("main", "main~1")]
        found.append([*trees, *kept])
        data.mkdir(exist_ok=True)
        (data / "built").mkdir(exist_ok=True)
        out = json.dumps({"cells": [{"verdict": "needed"}]}).encode()
        return subprocess.CompletedProcess(words, 0, out)

    monkeypatch.setattr(watching.subprocess, "run", run)
    return found


def test_watches_of_a_new_commit_and_of_nothing_new_are_timed(
    watches: Watches, tmp_path: Path
) -> None:
    """Both have one remote and data directory; a later run replaces the times of its release."""
    file = tmp_path / "upkeep.md"
    file.write_text("# Upkeep\n\n## Time of a watch\n\nold\n\n## Next\n\nmore\n")
    for name in ("0.3.1", "0.3.2", "0.3.1"):
        made = CliRunner().invoke(command.app, ["--watch", name, "--write", str(file)])
        assert made.exit_code == 0, made.output
    before = "\n".join(sorted(ONE))
    assert watches[0] == ["\n".join(sorted([*ONE, "new.txt"])), before]
    assert watches[1] == [*watches[0], "built"]
    rows = [(one.release, one.state, one.verdict) for one in watching.kept()]
    states = (watching.NEW, watching.NOTHING)
    assert rows == [(name, state, "needed") for name in ("0.3.2", "0.3.1") for state in states]
    text = file.read_text()
    assert text.startswith("# Upkeep\n\n## Time of a watch\n") and text.endswith(
        "## Next\n\nmore\n"
    )
    assert text.count("| 0.3.1 | nothing new | needed |") == 1 and "\nold\n" not in text
    assert page.page([], watched=watching.kept()).endswith(
        "\n".join(made.stdout.splitlines()[-3:]) + "\n"
    )


def test_watch_without_a_verdict_has_no_time(
    watches: Watches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the watch, such as a failed fetch, is not recorded as a short one."""
    ended = subprocess.CompletedProcess([], 4, b"")
    monkeypatch.setattr(watching.subprocess, "run", lambda *_, **__: ended)
    made = CliRunner().invoke(command.app, ["--watch", "0.3.1"])
    assert isinstance(made.exception, HarnessError) and "ended with 4" in str(made.exception)
    assert watching.kept() == []
