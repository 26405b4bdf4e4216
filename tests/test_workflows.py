"""The workflow files are YAML of the right shape, and every command in them exists."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from pyllamakv.cli import main

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Programs that every runner has.
PLAIN = {"echo", "find", "python", "sudo"}


def load(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def commands(text: str) -> list[list[str]]:
    """Return the commands of a script as words, those inside ``$(…)`` as well."""
    found = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        plain = re.sub(r"\$\{\{.*?\}\}", "0.3.9", line)
        inner = re.findall(r"\$\(([^()]*)\)", plain)
        for part in (re.sub(r"\$\([^()]*\)", "x", plain), *inner):
            words = [word for word in shlex.split(part.split(">")[0]) if not word.startswith("$")]
            if words and not re.fullmatch(r"\w+=.*", words[0]):
                found.append(words)
    return found


SCRIPTS = [
    pytest.param(path, step["run"], id=f"{path.stem}-{job}-{number}")
    for path in FILES
    for job, facts in load(path)["jobs"].items()
    for number, step in enumerate(facts["steps"])
    if "run" in step
]


def test_the_three_are_there() -> None:
    """Tests, the matrix and the nightly canary each have a file."""
    assert [path.stem for path in FILES] == ["canary", "matrix", "tests"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shape(path: Path) -> None:
    """Each has a name, triggers, few permissions, and jobs with a limit and known steps."""
    found = load(path)
    assert set(found) <= {"name", True, "permissions", "concurrency", "jobs"}
    assert found[True] and found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] and job["runs-on"], name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(found["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            assert set(step) <= {"uses", "run", "with", "name", "id", "if", "env"}, (name, step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


def test_what_every_change_has_to_pass() -> None:
    """The workflow makes what the project's own CI makes, the matrix apart, which has its own."""
    ours = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    jobs = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"].values()
    text = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    made = set(re.findall(r"^make (\w+)", text, re.M))
    assert set(ours) - {"eras"} <= made


def test_the_canary_runs_every_night() -> None:
    """It has a time of the day and no day."""
    (when,) = load(ROOT / ".github" / "workflows" / "canary.yml")[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])


@pytest.mark.parametrize(("path", "text"), SCRIPTS)
def test_every_command_exists(path: Path, text: str) -> None:
    """Make has the target, pyllamakv the verb, its subcommand and each option."""
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
def test_the_shell_understands(path: Path, text: str) -> None:
    """Bash parses each script."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    script = re.sub(r"\$\{\{.*?\}\}", "0.3.9", text)
    subprocess.run([bash, "-n"], input=script.encode(), check=True, timeout=300)


def check_verb(words: list[str]) -> None:
    """Look a verb up, its subcommand and its options; nothing is run."""
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
