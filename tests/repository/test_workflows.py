"""Test that the workflow files are valid, and that every command in them exists."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from pyllamakv.cli import main
from pyllamakv.source import git_command

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Programs that every runner has.
PLAIN = {"cat", "echo", "find", "gh", "git", "python", "sudo"}
#: Words of the shell that start a line and are not commands.
SHELL = {"for", "done"}


def load(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def commands(text: str) -> list[list[str]]:
    """Return the commands of a script as words, including those inside ``$(…)``."""
    found = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        plain = re.sub(r"\$\{\{.*?\}\}", "0.3.9", line)
        inner = re.findall(r"\$\(([^()]*)\)", plain)
        for part in (re.sub(r"\$\([^()]*\)", "x", plain), *inner):
            words = [word for word in shlex.split(part.split(">")[0]) if not word.startswith("$")]
            if words and words[0] not in SHELL and not re.fullmatch(r"\w+=.*", words[0]):
                found.append(words)
    return found


SCRIPTS = [
    pytest.param(path, step["run"], id=f"{path.stem}-{job}-{number}")
    for path in FILES
    for job, facts in load(path)["jobs"].items()
    for number, step in enumerate(facts["steps"])
    if "run" in step
]


def test_three_workflows_exist() -> None:
    """Tests, the matrix and the nightly canary have one file each."""
    assert [path.stem for path in FILES] == ["canary", "matrix", "tests"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_workflow_has_triggers_permissions_and_known_steps(path: Path) -> None:
    """Each has a name, triggers, few permissions, and jobs with a timeout and known steps."""
    found = load(path)
    assert set(found) <= {"name", True, "permissions", "concurrency", "jobs"}
    assert found[True] and found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] and job["runs-on"], name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(found["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            known = {"uses", "run", "with", "name", "id", "if", "env", "timeout-minutes"}
            assert set(step) <= known, (name, step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+(/[a-z]+)?@v\d+", step["uses"])


def test_only_the_canary_may_write() -> None:
    """It pushes branches and opens pull requests; no other job has its own permissions."""
    found = {
        (path.stem, name): job["permissions"]
        for path in FILES
        for name, job in load(path)["jobs"].items()
        if "permissions" in job
    }
    assert found == {("canary", "watch"): {"contents": "write", "pull-requests": "write"}}


@pytest.mark.slow
def test_workflow_is_valid_against_the_schema() -> None:
    """GitHub's schema accepts each file."""
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run(
        [sys.executable, *words, *map(str, FILES)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_canary_publishes_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new branch and a replaced one are pushed, with one pull request each."""
    scripts = [
        step["run"]
        for step in load(ROOT / ".github" / "workflows" / "canary.yml")["jobs"]["watch"]["steps"]
        if step.get("run", "").startswith("git ")
    ]
    tools = tmp_path / "tools"
    tools.mkdir()
    opened = tmp_path / "opened"
    kept = f'view) grep -qx "$3" {opened};; create) echo "$4" >> {opened};;'
    (tools / "gh").write_text(f"#!/bin/sh\ncase $2 in {kept} esac\n")
    (tools / "gh").chmod(0o755)
    opened.touch()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    person = git_command.environment() | {"GIT_ALLOW_PROTOCOL": "file"}

    def git(folder: Path, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, env=person, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def night(*changes: tuple[str, ...]) -> None:
        """Run the scripts in a new clone; the changes are those of `matrix watch`."""
        clone = tmp_path / "clone"
        git(tmp_path, "init", "-q", str(clone))
        git(clone, "remote", "add", "origin", f"file://{origin}")
        git(clone, "fetch", "-q", "origin")
        git(clone, "checkout", "-q", "-B", "main", "origin/main")
        for number, script in enumerate(scripts):
            words = ["bash", "-e", "-o", "pipefail", "-c", script]
            done = subprocess.run(words, cwd=clone, env=person, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            for change in () if number else changes:
                git(clone, *change)
        shutil.rmtree(clone)

    origin = tmp_path / "origin"
    git(tmp_path, "init", "-q", str(origin))
    git(origin, "commit", "-q", "--allow-empty", "-m", "one")
    night()
    assert opened.read_text() == ""
    one, two = (("commit", "-q", "--allow-empty", "-m", name) for name in ("first", "second"))
    night(one, ("branch", "watch/b1"), ("branch", "other"))
    night(two, ("branch", "-f", "watch/b1"), ("branch", "watch/b2"))
    heads = [git(origin, "log", "--format=%s", name) for name in ("watch/b1", "watch/b2")]
    assert heads == ["second\none", "second\none"]
    assert opened.read_text().split() == ["watch/b1", "watch/b2"]
    assert git(origin, "branch", "--list", "other") == ""


def test_workflow_runs_the_parts_of_ci() -> None:
    """The workflow runs the steps of the project's CI, except for the matrix."""
    ours = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    jobs = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"].values()
    text = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    made = set(re.findall(r"^make (\w+)", text, re.M))
    assert set(ours) - {"eras"} <= made


def test_the_canary_runs_every_night() -> None:
    """It has a time of day and runs on each day."""
    (when,) = load(ROOT / ".github" / "workflows" / "canary.yml")[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])


@pytest.mark.parametrize(("path", "text"), SCRIPTS)
def test_every_command_exists(path: Path, text: str) -> None:
    """The make target, and the verb of pyllamakv with its options, exist."""
    found = commands(text)
    assert found
    for words in found:
        program = Path(words[0]).name
        if program == "make":
            subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=300
            )
        elif program == "pyllamakv":
            check_verb(words[1:])
        else:
            assert program in PLAIN, words


@pytest.mark.parametrize(("path", "text"), SCRIPTS)
def test_bash_parses_each_workflow_script(path: Path, text: str) -> None:
    """Bash parses each script."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    script = re.sub(r"\$\{\{.*?\}\}", "0.3.9", text)
    subprocess.run([bash, "-n"], input=script.encode(), check=True, timeout=300)


def check_verb(words: list[str]) -> None:
    """Look up a verb, its subcommand and its options; nothing is run."""
    assert words[0] in main.VERBS, words
    command: Any = typer.main.get_command(importlib.import_module(f"pyllamakv.cli.{words[0]}").app)
    rest = words[1:]
    if hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for param in command.params for option in param.opts}
    for word in rest:
        if word.startswith("-"):
            assert word.split("=")[0] in known, (words, sorted(known))
