"""Test the systemd unit, the container file and the quick start of docs/serve.md.

Neither systemd nor Docker runs here: commands, options and files are compared with the package.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn")

import typer

from pyllamakv.cli import main
from pyllamakv.serve import service

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
UNIT, CONTAINER = (
    re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    for language in ("ini", "dockerfile")
)
#: Seconds after which `docker stop` kills a container.
DOCKER_STOP = 10


def commands() -> Iterator[list[str]]:
    """Yield the words of each command of pyllamakv in a block, from the verb on."""
    for block in re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("ENTRYPOINT "):
                yield json.loads(line.partition(" ")[2])[1:]
            elif found := re.search(r"(?:^|/bin/)pyllamakv ([a-z][^&]*)", line):
                yield found[1].split()


def options(words: list[str]) -> dict[str, str]:
    """Return the options of a command with the words that follow them."""
    return {
        word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word[0] == "-"
    }


def test_commands_of_the_page_have_existing_verbs_and_options() -> None:
    """Those of the unit, the container and the quick start build and serve."""
    found = list(commands())
    assert sorted(words[0] for words in found) == ["build"] * 3 + ["serve"] * 3
    for words in found:
        assert words[0] in main.VERBS
        command: Any = typer.main.get_command(
            importlib.import_module(f"pyllamakv.cli.{words[0]}").app
        )
        known = {option for param in command.params for option in param.opts}
        assert set(options(words)) <= known, words


def test_unit_waits_for_the_grace_period_and_writes_where_it_may() -> None:
    """Its data directory is that of the build, and its status is that of SIGTERM."""
    facts = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line)
    grace = inspect.signature(service.ServeOptions).parameters["grace"].default
    assert float(facts["TimeoutStopSec"]) > grace + service._LAST_SECONDS
    assert facts["SuccessExitStatus"] == "143"
    home = facts["Environment"].removeprefix("PYLLAMAKV_HOME=")
    assert f"sudo env PYLLAMAKV_HOME={home} {facts['ExecStart'].split()[0]} build" in PAGE
    assert f"-o {facts['User']} {home}/digests" in PAGE
    name, _, path = facts["LoadCredential"].partition(":")
    assert f"${{CREDENTIALS_DIRECTORY}}/{name}" in facts["ExecStart"]
    assert f"sudo install -D -m 600 keys {path}" in PAGE
    assert facts["StateDirectory"] and "${STATE_DIRECTORY}" in facts["ExecStart"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """It does with another program, because that of the unit is not installed here."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "pyllamakv.service"
    path.write_text(re.sub(r"(?<=^ExecStart=)\S+", sys.executable, UNIT, flags=re.MULTILINE))
    done = subprocess.run(
        [analyze, "verify", "--man=no", path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_container_copies_what_a_build_needs() -> None:
    """Its sources exist, and have the files of the package and of pyproject.toml."""
    copied = [
        source
        for line in CONTAINER.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = facts["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for needed in (facts["project"]["readme"], *included):
        assert any(needed == each or needed.startswith(f"{each}/") for each in copied), needed


def test_container_ends_before_it_is_killed() -> None:
    """Its grace period leaves the seconds of the last answers; its directories are volumes."""
    served = next(words for words in commands() if "--grace" in words)
    given = options(served)
    assert float(given["--grace"]) + service._LAST_SECONDS <= DOCKER_STOP
    (volumes,) = re.findall("^VOLUME (.*)$", CONTAINER, re.MULTILINE)
    (home,) = set(re.findall("^ENV PYLLAMAKV_HOME=(.*)$", CONTAINER, re.MULTILINE))
    assert volumes.split() == [given["--store"], f"{home}/digests"]
    (port,) = re.findall("^EXPOSE (.*)$", CONTAINER, re.MULTILINE)
    assert int(port) == inspect.signature(service.ServeOptions).parameters["port"].default
    for path in (given["--store"], f"{home}/digests", given["--api-key-file"]):
        assert re.search(rf":{path}(:ro)?\b", PAGE), path
