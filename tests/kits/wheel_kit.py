"""Build wheels, and run Python in an environment that has them and nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest


def command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(words, check=False, **{**given, **options})  # type: ignore[call-overload]


def built(source: Path, folder: Path) -> Path:
    """Build the wheel of a checkout or an sdist, without the network."""
    words = ("pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = command(sys.executable, "-m", *words, str(folder), str(source), env=env, cwd=folder)
    if "No module named pip" in done.stderr:
        pytest.skip("this interpreter has no pip")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def environment(folder: Path, wheels: Iterable[Path]) -> Path:
    """Make a new environment with the wheels and the present dependencies. Return ``folder``."""
    python = folder / "venv" / "bin" / "python"
    assert (
        command(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")).returncode == 0
    )
    names = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=names))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    # Behind the wheels, and without what path files add, one of which may lead to the checkout.
    found = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    (packages / "ours.pth").write_text("\n".join(found) + "\n", encoding="utf-8")
    for name in ("home", "empty"):
        (folder / name).mkdir()
    assert python.exists()
    return folder


def run(outside: Path, *words: str, path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    """Run the Python of an environment, in an empty directory with its own data directory."""
    env = {"HOME": str(outside / "home"), "PATH": path, "LANG": "C.UTF-8"}
    python = str(outside / "venv" / "bin" / "python")
    return command(python, *words, env=env, cwd=outside / "empty")
