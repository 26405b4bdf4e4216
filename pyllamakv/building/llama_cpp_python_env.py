"""Install the llama-cpp-python of a release without its library, and its tests.

Each release has a small virtual environment. Common packages (numpy, and those that the tests
import) are installed once in a shared environment that the others include.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from pyllamakv.errors import ArchiveError, CommandFailed, ToolMissing, Unsupported
from pyllamakv.home import home
from pyllamakv.source import fetch, tarball
from pyllamakv.source.files import locked, translate_disk_errors, write_text_atomic
from pyllamakv.source.progress import no_progress
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

#: Increased when this module changes the setup.
RECIPE = 1
#: Disables the build of llama.cpp in llama-cpp-python, in all known versions.
NO_LIBRARY = "-DLLAMA_BUILD=OFF"

_READY = "ready.json"
_TEST = re.compile(r"[^/]+/(?P<path>tests/[\w.-]+\.py|pyproject\.toml)")
_MODEL = re.compile(rb"vendor/llama\.cpp/(models/[\w.-]+)")
#: With these variables, pip would install into another environment.
_DROPPED = re.compile(
    r"PIP_(TARGET|PREFIX|ROOT|USER|NO_BUILD_ISOLATION|DRY_RUN|REQUIRE_VIRTUALENV|REQUIREMENT|"
    r"CONSTRAINT|PYTHON)|PYTHON\w*|CMAKE_\w+|SKBUILD_\w+|(C|CXX|CPP|LD)FLAGS"
)


@dataclass(frozen=True)
class LlamaCppPythonEnv:
    """An installed llama-cpp-python: its environment and its version."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        """Return the interpreter that imports this llama-cpp-python."""
        return self.folder / "bin" / "python"

    @property
    def suite(self) -> Path:
        """Return the folder that its own tests are run in."""
        return self.folder / "suite"


def root() -> Path:
    """Return the folder of all environments."""
    return home() / "dropin"


def installed(version: str) -> LlamaCppPythonEnv | None:
    """Return the llama-cpp-python of this version, or None when it was not set up here."""
    found = LlamaCppPythonEnv(root() / version, version)
    try:
        facts = json.loads((found.folder / _READY).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if facts == _facts(found) and found.python.exists() else None


def install(release: Release, *, progress: Progress | None = None) -> LlamaCppPythonEnv:
    """Return the llama-cpp-python of a release, set up first when it is not there.

    Its sdist is checked against the lock, and then built by pip, which runs code of it. Raises
    Unsupported for a release that no llama-cpp-python contains, ToolMissing without pip,
    CommandFailed with pip's words, or the errors of fetching.
    """
    if release.kind != "sdist":
        msg = (
            f"release {release.name} is not a release of llama-cpp-python; choose one such as 0.3.9"
        )
        raise Unsupported(msg, "dropin")
    tell = progress or no_progress
    with locked(home() / "locks" / "dropin.lock"):
        there = installed(release.name)
        if there:
            return there
        _need_pip()
        fetch.fetch(release, progress=progress)
        kept = (fetch.downloads() / (release.archive or "")).is_file()
        sdist = fetch.archive(release, progress)
        peer = LlamaCppPythonEnv(root() / release.name, release.name)
        with translate_disk_errors(root()):
            shutil.rmtree(peer.folder, ignore_errors=True)
            base = _environment(root() / "base")
            _environment(peer.folder)
            (_packages(peer.folder) / "base.pth").write_text(f"{_packages(base.parent.parent)}\n")
            extract_tests(sdist, peer.suite, release)
        needs = requirements((peer.suite / "pyproject.toml").read_text("utf-8"))
        tell(f"install what the tests of {release.package} need", 0, None)
        _pip(base, *needs)
        tell(f"install {release.package} without its library", 0, None)
        # pip must not keep this wheel: a later install would get a package without its library.
        _pip(peer.python, "--no-deps", "--no-cache-dir", str(sdist))
        if not kept:
            sdist.unlink(missing_ok=True)
        write_text_atomic(peer.folder / _READY, json.dumps(_facts(peer)) + "\n")
    return peer


def requirements(pyproject: str) -> list[str]:
    """Return the dependencies of a version and its tests, without the package itself."""
    project: dict[str, Any] = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {})
    named = [*project.get("dependencies", ()), *extras.get("test", ("pytest", "scipy"))]
    own = {"llama-cpp-python", "llama_cpp_python"}
    return sorted({need for need in named if Requirement(need).name.lower() not in own})


def extract_tests(sdist: Path, folder: Path, release: Release) -> None:
    """Extract the tests of an sdist into a directory, with the llama.cpp files that they use."""
    (folder / "tests").mkdir(parents=True)
    with tarball.open_tar(sdist) as tar:
        for member in tar:
            match = _TEST.fullmatch(member.name)
            if match:
                tarball.copy_member(tar, member, folder / match["path"])
    if not (folder / "pyproject.toml").is_file() or not any((folder / "tests").iterdir()):
        msg = f"{sdist.name} has no pyproject.toml, or no tests"
        raise ArchiveError(msg)
    named = {
        found.decode()
        for file in (folder / "tests").iterdir()
        for found in _MODEL.findall(file.read_bytes())
    }
    for path, data in open_store().read_many(release, sorted(named)).items():
        if data is not None:
            place = folder / "vendor" / "llama.cpp" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


def _facts(peer: LlamaCppPythonEnv) -> dict[str, Any]:
    # An environment cannot be moved, and belongs to one Python.
    return {"recipe": RECIPE, "folder": str(peer.folder), "python": sys.version}


def _environment(folder: Path) -> Path:
    """Create a virtual environment without pip, unless there is one; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists() or not _runs(python):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False, symlinks=True)
    return python


def _runs(python: Path) -> bool:
    command = [os.fspath(python), "-c", f"import sys; sys.exit(sys.version != {sys.version!r})"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _packages(folder: Path) -> Path:
    names = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "venv", vars=names))


def _need_pip() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        hint = "python3 -m ensurepip, or your system's package python3-pip"
        msg = f"installing llama-cpp-python needs pip in {sys.executable}: {hint}"
        raise ToolMissing(msg, "pip", hint)


def _pip(python: Path, *words: str) -> None:
    command: Sequence[str] = (
        *(sys.executable, "-m", "pip", "--python", str(python)),
        *("install", "--quiet", "--disable-pip-version-check", "--no-input", *words),
    )
    env = {key: value for key, value in os.environ.items() if not _DROPPED.fullmatch(key)}
    env["CMAKE_ARGS"] = NO_LIBRARY
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        last = next((line for line in reversed(said.splitlines()) if "ERROR" in line), said[-300:])
        msg = f"pip could not install {' '.join(words)}: {last}"
        raise CommandFailed(msg, command, done.returncode, said, last)
