"""Look for everything that fetching, building and testing need, and name the cure of what lacks."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import build, cmake, compiler, probing
from pyllamakv.building.probing import Finding
from pyllamakv.errors import GitError, KvError
from pyllamakv.home import home
from pyllamakv.source import gitting

if TYPE_CHECKING:
    from collections.abc import Callable

_GIB = 1 << 30
#: One release's objects, store and two variants take less than this.
_DISK = 3 * _GIB
_MEMORY = 2 * _GIB


def examine() -> list[Finding]:
    """Return one finding per tool, resource and backend, the necessary ones first."""
    looks: tuple[Callable[[], Finding], ...] = (
        _platform,
        _python,
        _compiler,
        lambda: _program("make", "needed by `make build`", "apt-get install make"),
        _git,
        lambda: _wheel("cmake"),
        lambda: _wheel("ninja"),
        _disk,
        _memory,
        _cache,
        lambda: _program("npm", "needed to fetch the b… releases only", "apt-get install npm"),
        probing.cpu,
        probing.rpc,
        probing.gpu,
        probing.metal,
        probing.vulkan,
    )
    return [look() for look in looks]


def healthy(findings: list[Finding]) -> bool:
    """Tell whether nothing necessary is missing."""
    return not any(finding.state == "missing" for finding in findings)


def _platform() -> Finding:
    shown = f"{platform.system()} on {platform.machine()}"
    if sys.platform.startswith("linux"):
        return Finding("platform", "ok", shown)
    if sys.platform == "darwin":
        return Finding("platform", "optional", shown, "written for, but never run; please report")
    return Finding("platform", "missing", shown, "use Linux (or WSL on Windows)")


def _python() -> Finding:
    # An older Python could not have imported this package.
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _compiler() -> Finding:
    try:
        found = compiler.find()
    except KvError as error:
        return Finding("compiler", "missing", "none", str(error))
    return Finding("compiler", "ok", f"{found.identity} ({found.cxx})")


def _git() -> Finding:
    try:
        return Finding("git", "ok", gitting.git(Path("/"), "--version"))
    except GitError as error:
        return Finding("git", "missing", error.output.strip(), "apt-get install git")


def _program(name: str, why: str, cure: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, "optional", f"none ({why})", cure)
    return Finding(name, "ok", path)


def _wheel(name: str) -> Finding:
    try:
        path = cmake.binary(name)
    except KvError as error:
        return Finding(name, "missing", "none", str(error))
    return Finding(name, "ok", _first_line(str(path), "--version"))


def _disk() -> Finding:
    place = home()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    shown = f"{free / _GIB:.1f} GiB free for {home()}"
    if not os.access(place, os.W_OK):
        return Finding("disk", "missing", f"{place} cannot be written", "set PYLLAMAKV_HOME")
    if free < _DISK:
        cure = f"free {_DISK // _GIB} GiB, or set PYLLAMAKV_HOME to another disk"
        return Finding("disk", "missing", shown, cure)
    return Finding("disk", "ok", shown)


def _memory() -> Finding:
    free = build.available_memory()
    jobs = build.default_jobs()
    if free >= 1 << 40:
        return Finding("memory", "ok", f"not told by this system; {jobs} compilers at once")
    shown = f"{free / _GIB:.1f} GiB available; {jobs} compilers at once"
    if free < _MEMORY:
        return Finding("memory", "optional", shown, "close something, or build with --jobs 1")
    return Finding("memory", "ok", shown)


def _cache() -> Finding:
    path = compiler.launcher()
    if path is None:
        cure = "apt-get install ccache (rebuilds of other releases become several times faster)"
        return Finding("ccache", "optional", "none", cure)
    return Finding("ccache", "ok", path)


def _first_line(program: str, *args: str) -> str:
    try:
        done = subprocess.run(
            [program, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} ({error})"
    lines = done.stdout.splitlines()
    return f"{lines[0]} ({Path(program)})" if lines else program
