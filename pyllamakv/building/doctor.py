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
from pyllamakv.building.probing import ProbeResult
from pyllamakv.errors import GitError, KvError
from pyllamakv.home import home
from pyllamakv.source import gitting

if TYPE_CHECKING:
    from collections.abc import Callable

_GIB = 1 << 30
#: One release's objects, store and two variants take less than this.
_DISK = 3 * _GIB
_MEMORY = 2 * _GIB


def examine() -> list[ProbeResult]:
    """Return one finding per tool, resource and backend, the necessary ones first."""
    looks: tuple[Callable[[], ProbeResult], ...] = (
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


def healthy(findings: list[ProbeResult]) -> bool:
    """Tell whether nothing necessary is missing."""
    return not any(finding.state == "missing" for finding in findings)


def _platform() -> ProbeResult:
    shown = f"{platform.system()} on {platform.machine()}"
    if sys.platform.startswith("linux"):
        return ProbeResult("platform", "ok", shown)
    if sys.platform == "darwin":
        return ProbeResult(
            "platform", "optional", shown, "written for, but never run; please report"
        )
    return ProbeResult("platform", "missing", shown, "use Linux (or WSL on Windows)")


def _python() -> ProbeResult:
    # An older Python could not have imported this package.
    return ProbeResult("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _compiler() -> ProbeResult:
    try:
        found = compiler.find()
    except KvError as error:
        return ProbeResult("compiler", "missing", "none", str(error))
    return ProbeResult("compiler", "ok", f"{found.identity} ({found.cxx})")


def _git() -> ProbeResult:
    try:
        return ProbeResult("git", "ok", gitting.git(Path("/"), "--version"))
    except GitError as error:
        return ProbeResult("git", "missing", error.output.strip(), "apt-get install git")


def _program(name: str, why: str, cure: str) -> ProbeResult:
    path = shutil.which(name)
    if path is None:
        return ProbeResult(name, "optional", f"none ({why})", cure)
    return ProbeResult(name, "ok", path)


def _wheel(name: str) -> ProbeResult:
    try:
        path = cmake.binary(name)
    except KvError as error:
        return ProbeResult(name, "missing", "none", str(error))
    return ProbeResult(name, "ok", _first_line(str(path), "--version"))


def _disk() -> ProbeResult:
    place = home()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    shown = f"{free / _GIB:.1f} GiB free for {home()}"
    if not os.access(place, os.W_OK):
        return ProbeResult("disk", "missing", f"{place} cannot be written", "set PYLLAMAKV_HOME")
    if free < _DISK:
        cure = f"free {_DISK // _GIB} GiB, or set PYLLAMAKV_HOME to another disk"
        return ProbeResult("disk", "missing", shown, cure)
    return ProbeResult("disk", "ok", shown)


def _memory() -> ProbeResult:
    free = build.available_memory()
    jobs = build.default_jobs()
    if free >= 1 << 40:
        return ProbeResult("memory", "ok", f"not told by this system; {jobs} compilers at once")
    shown = f"{free / _GIB:.1f} GiB available; {jobs} compilers at once"
    if free < _MEMORY:
        return ProbeResult("memory", "optional", shown, "close something, or build with --jobs 1")
    return ProbeResult("memory", "ok", shown)


def _cache() -> ProbeResult:
    path = compiler.launcher()
    if path is None:
        cure = "apt-get install ccache (rebuilds of other releases become several times faster)"
        return ProbeResult("ccache", "optional", "none", cure)
    return ProbeResult("ccache", "ok", path)


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
