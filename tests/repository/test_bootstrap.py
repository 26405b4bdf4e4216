"""Test the bootstrap script: selection of Python, messages and repeated runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building_kit import script

ROOT = Path(__file__).resolve().parents[2]

#: A Python with fake pip and venv; everything else is passed to the real one.
PYTHON = """
here=$0
case "$*" in
*EXTERNALLY-MANAGED*) [ -z "${MANAGED:-}" ]; exit ;;
*'distribution("pyllamakv")'*) echo "${ORIGIN:-$PWD}"; exit ;;
*langchain_openai*) exit 1 ;;
*'find_spec'*) exit ;;
*'split("==")'*) exit 1 ;;
'-m pip --version') [ -z "${NO_PIP:-}" ]; exit ;;
'-m pip '*) echo "$*" >>"$CALLS"; [ -z "${PIP_FAILS:-}" ]; exit ;;
'-m venv'*|'-m virtualenv'*)
    echo "$*" >>"$CALLS"
    [ -z "${NO_VENV:-}" ] || exit 1
    mkdir -p .venv/bin && cp "$here" .venv/bin/python
    exit ;;
esac
"""


class Place:
    """A copy of the script in its own directory, and the fake programs that it finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.calls = folder / "calls"
        (folder / "tools").mkdir(parents=True)
        (folder / "vendor").mkdir()
        text = (ROOT / "tools" / "bootstrap.sh").read_text(encoding="utf-8")
        # The system's Python must not replace the one that the test removes.
        text = text.replace("/usr/bin/python3", "absent-python")
        (folder / "tools" / "bootstrap.sh").write_text(text, encoding="utf-8")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.programs.mkdir()
        for name in ("sh", "dirname", "rm", "mkdir", "cat", "cp"):
            found = shutil.which(name)
            assert found is not None
            (self.programs / name).symlink_to(found)

    def python(self) -> str:
        """Put the fake Python on PATH and return its path."""
        body = PYTHON + f'exec {shlex.quote(sys.executable)} "$@"\n'
        return str(script(self.programs / "python3", body))

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the script with an otherwise empty environment."""
        full = {"PATH": str(self.programs), "CALLS": str(self.calls), **env}
        if os.environ.get("PYTHONPATH"):
            full["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return subprocess.run(
            [str(self.programs / "sh"), "tools/bootstrap.sh", *words],
            cwd=self.folder,
            env=full,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def called(self) -> list[str]:
        """Return the calls of pip and venv."""
        return self.calls.read_text("utf-8").splitlines() if self.calls.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a directory with the script; its path has a space."""
    return Place(tmp_path / "a folder")


def test_own_environment_is_made_once(place: Place) -> None:
    """The first run creates .venv and installs; the second one does neither."""
    place.python()
    for _ in range(2):
        done = place.run("own", "test")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{place.folder}/.venv/bin/python\n"
    calls = place.called()
    assert len(calls) == 2
    assert calls[0].startswith("-m venv")
    assert "install" in calls[1]
    assert calls[1].endswith("-e .[test]")


def test_new_dependencies_are_installed(place: Place) -> None:
    """After a change of pyproject.toml, the next run installs again."""
    place.python()
    place.run("own", "test")
    with (place.folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    place.run("own", "test")
    assert sum("install" in call for call in place.called()) == 2


def test_other_checkout_in_the_same_python(place: Place) -> None:
    """If another checkout was installed since, this one is installed again."""
    place.python()
    place.run("own", "test")
    place.run("own", "test", ORIGIN="/a/checkout that was deleted")
    assert sum("install" in call for call in place.called()) == 2


@pytest.mark.parametrize("door", ["own", "here"])
def test_environment_of_another_checkout(place: Place, tmp_path: Path, door: str) -> None:
    """An active environment, or a Python, with the package of another checkout is not changed."""
    python = place.python()
    other, active = tmp_path / "another checkout", tmp_path / "active"
    other.mkdir()
    (other / "pyproject.toml").touch()
    (active / "bin").mkdir(parents=True)
    # In .venv, the fake Python reports no other checkout.
    body = Path(python).read_text("utf-8").replace("${ORIGIN:-$PWD}", f"{other}")
    script(active / "bin" / "python", body)
    done = place.run(door, "test", VIRTUAL_ENV=str(active))
    assert done.stdout == f"{place.folder}/.venv/bin/python\n", done.stderr
    assert f"is used by the checkout {other}: using .venv" in done.stderr
    assert sum("install" in call for call in place.called()) == 1
    script(place.programs / "python3", body)
    if door == "here":
        done = place.run("here", "test")
        assert done.stdout == f"{place.folder}/.venv/bin/python\n", done.stderr
        assert f"python3 is used by the checkout {other}: using .venv" in done.stderr


@pytest.mark.parametrize("active", [True, False])
def test_environment_of_another_checkout_without_the_package(
    place: Place, tmp_path: Path, active: bool
) -> None:
    """Nothing is installed into another checkout's .venv; that of another project is used."""
    body = Path(place.python()).read_text("utf-8")
    other = tmp_path / "another checkout"
    programs = other / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "python3"):
        missing = body.replace('echo "${ORIGIN:-$PWD}"; exit ;;', "exit 1 ;;")
        script(programs / name, missing)
    env = {"VIRTUAL_ENV": f"{other}/.venv"} if active else {}
    env["PATH"] = f"{programs}:{place.programs}"
    done = place.run("here", "test", **env)
    assert done.stdout.startswith(f"{programs}/python"), done.stderr
    (other / "pyllamakv").mkdir()
    (other / "pyllamakv" / "__init__.py").touch()
    for door in ("own", "here"):
        done = place.run(door, "test", **env)
        if active or door == "here":
            assert f"is used by the checkout {other}: using .venv" in done.stderr
        assert done.stdout == f"{place.folder}/.venv/bin/python\n", done.stderr


def test_system_python_is_used_if_pip_may_install(place: Place) -> None:
    """`make build` installs into the Python that runs pytest."""
    python = place.python()
    done = place.run("here", "test")
    assert done.stdout == f"{python}\n", done.stderr
    assert not (place.folder / ".venv").exists()


@pytest.mark.parametrize("reason", ["MANAGED", "PIP_REQUIRE_VIRTUALENV"])
def test_externally_managed_python_uses_a_venv(place: Place, reason: str) -> None:
    """If the system's pip refuses, .venv is used, and the hint has the test command."""
    place.python()
    done = place.run("here", "test", **{reason: "1"})
    assert done.stdout == f"{place.folder}/.venv/bin/python\n", done.stderr
    hint = place.run("hint", done.stdout.strip())
    assert hint.stdout == ". .venv/bin/activate && pytest\n"


def test_active_virtual_environment_is_used(place: Place, tmp_path: Path) -> None:
    """The package is installed into the active virtual environment."""
    python = place.python()
    active = tmp_path / "active"
    (active / "bin").mkdir(parents=True)
    shutil.copy(python, active / "bin" / "python")
    for door in ("own", "here"):
        done = place.run(door, "test", VIRTUAL_ENV=str(active))
        assert done.stdout == f"{active}/bin/python\n", done.stderr


def test_missing_python_names_the_package(place: Place) -> None:
    """The error has the command to install it, once."""
    done = place.run("own", "test")
    assert done.returncode == 2
    assert "apt-get install python3" in done.stderr
    assert done.stdout == ""


def test_too_old_python_is_refused(place: Place) -> None:
    """A Python that is too old is ignored."""
    script(place.programs / "python3", "exit 1\n")
    done = place.run("own", "test")
    assert done.returncode == 2
    assert "3.11" in done.stderr


def test_missing_venv_names_the_package(place: Place) -> None:
    """If no environment can be created, the missing package is named and no file is left."""
    place.python()
    done = place.run("own", "test", NO_VENV="1")
    assert done.returncode == 2
    assert "apt-get install python3-venv" in done.stderr
    assert not (place.folder / ".venv").exists()


def test_failed_installation_is_retried_by_the_next_run(place: Place) -> None:
    """A failure of pip is reported, and the next run retries."""
    place.python()
    done = place.run("own", "test", PIP_FAILS="1")
    assert done.returncode == 2
    assert "pip could not install" in done.stderr
    assert place.run("own", "test").returncode == 0


@pytest.mark.parametrize("fails", ["", "1"])
def test_failed_peer_installation_skips_its_tests(place: Place, fails: str) -> None:
    """If the installation of the peer without its library fails, only its tests are skipped."""
    done = place.run("peer", place.python(), PIP_FAILS=fails)
    assert done.returncode == 0, done.stderr
    assert "llama-cpp-python==" in place.called()[-1]
    assert "--no-cache-dir" in place.called()[-1]
    assert ("will be skipped" in done.stderr) == bool(fails)


@pytest.mark.parametrize("fails", ["", "1"])
def test_failed_installation_of_clients_skips_their_tests(place: Place, fails: str) -> None:
    """If the clients of `pyllamakv serve` cannot be installed, only their tests are skipped."""
    done = place.run("clients", place.python(), PIP_FAILS=fails)
    assert done.returncode == 0, done.stderr
    assert ".[clients]" in place.called()[-1]
    assert ("will be skipped" in done.stderr) == bool(fails)


def test_missing_clang_skips_header_fuzzing(place: Place) -> None:
    """Without clang and without root, only the fuzzing of the header is skipped."""
    done = place.run("clang")
    assert done.returncode == 0, done.stderr
    assert "kept-header will be skipped" in done.stderr


def test_unknown_bootstrap_word_is_refused(place: Place) -> None:
    """An unknown word is refused with the list of known ones."""
    assert "own, here, peer, clients, clang or hint" in place.run("there", "x").stderr


def test_makefile_has_the_targets_of_its_help() -> None:
    """Every target that the help lists exists, and the main ones are listed."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    output = subprocess.run(
        [make, "--no-print-directory", "help"],
        cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120, check=True,
    ).stdout  # fmt: skip
    targets = {line.split()[1] for line in output.splitlines() if line.startswith("  make ")}
    assert targets >= {"build", "check", "test", "bench", "lint", "matrix", "clean", "help"}
    for target in targets:
        done = subprocess.run(
            [make, "--no-print-directory", "-n", target],
            cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
