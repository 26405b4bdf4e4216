"""Check the requirements of fetching, building and testing; report how to install missing ones."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyllamakv.building import backend, build, cmake, compiler, cuda, nvidia, variant
from pyllamakv.errors import GitError, KvError
from pyllamakv.home import home, prebuilt
from pyllamakv.source import git_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

State = Literal["ok", "missing", "optional"]

_GIB = 1 << 30
#: Minimum free disk space: store, objects and two variants of a release take less.
_DISK = 3 * _GIB
_MEMORY = 2 * _GIB
#: Where drivers of Vulkan announce themselves.
_DRIVERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_DRIVER_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe: name, finding, and remedy.

    ``state`` is "optional" for a missing tool that builds and checks on the CPU do not need.
    """

    name: str
    state: State
    found: str
    hint: str = ""


def examine() -> list[ProbeResult]:
    """Return one finding per tool, resource and backend, the necessary ones first."""
    looks: tuple[Callable[[], ProbeResult], ...] = (
        _platform,
        _python,
        _compiler,
        lambda: _program("make", "needed by `make build`", "apt-get install make"),
        _git,
        libraries,
        lambda: _wheel("cmake"),
        lambda: _wheel("ninja"),
        _disk,
        _memory,
        _cache,
        lambda: _program("npm", "needed to fetch the b… releases only", "apt-get install npm"),
        cpu,
        rpc,
        gpu,
        metal,
        vulkan,
    )
    return [look() for look in looks]


def healthy(findings: list[ProbeResult]) -> bool:
    """Return whether nothing necessary is missing."""
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
        return ProbeResult("git", "ok", git_command.git(Path("/"), "--version"))
    except GitError as error:
        return ProbeResult("git", "missing", error.output.strip(), "apt-get install git")


def libraries() -> ProbeResult:
    """Return the variants of pyllamakv-prebuilt."""
    there = prebuilt()
    names = [] if there is None else sorted(each.id for each in variant.complete(there))
    if not names:
        hint = "pip install 'pyllamakv[prebuilt]', to open libraries without a compiler and git"
        return ProbeResult("prebuilt", "optional", "none", hint)
    return ProbeResult("prebuilt", "ok", f"{', '.join(names)}; no compiler or git needed")


def _program(name: str, why: str, hint: str) -> ProbeResult:
    path = shutil.which(name)
    if path is None:
        return ProbeResult(name, "optional", f"none ({why})", hint)
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
        hint = f"free {_DISK // _GIB} GiB, or set PYLLAMAKV_HOME to another disk"
        return ProbeResult("disk", "missing", shown, hint)
    return ProbeResult("disk", "ok", shown)


def _memory() -> ProbeResult:
    free = build.available_memory()
    jobs = build.default_jobs()
    if free >= 1 << 40:
        return ProbeResult("memory", "ok", f"not reported by this system; {jobs} compilers at once")
    shown = f"{free / _GIB:.1f} GiB available; {jobs} compilers at once"
    if free < _MEMORY:
        return ProbeResult("memory", "optional", shown, "close something, or build with --jobs 1")
    return ProbeResult("memory", "ok", shown)


def _cache() -> ProbeResult:
    path = compiler.launcher()
    if path is None:
        hint = "apt-get install ccache (rebuilds of other releases become several times faster)"
        return ProbeResult("ccache", "optional", "none", hint)
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


def cpu() -> ProbeResult:
    """Return which processor a build is tuned for."""
    try:
        found = compiler.find()
    except KvError as error:
        return ProbeResult("cpu", "optional", "unknown without a compiler", str(error))
    sets = ("avx512f", "avx2", "avx", "asimddp")
    best = next((name for name in sets if name in found.native_flags), "plain")
    text = f"{platform.machine()} with {best}; --portable leaves it out"
    if found.untested:
        hint = "set TMPDIR to a directory with free space in which programs can run"
        text += f"; AMX is not used, because its test failed: {found.untested}"
        return ProbeResult("cpu", "optional", text, hint)
    if found.native_options:
        text += f"; AMX is not used, because {found.version} compiles it incorrectly"
    return ProbeResult("cpu", "ok", text)


def rpc() -> ProbeResult:
    """Try to listen on loopback; the backend itself is in every CPU build."""
    try:
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            place.listen()
    except OSError as error:
        hint = "allow this process to listen on 127.0.0.1"
        return ProbeResult("rpc", "optional", f"no loopback: {error}", hint)
    return ProbeResult("rpc", "ok", "in every CPU build; `pyllamakv rpc serve` serves this machine")


def gpu(environ: Mapping[str, str] | None = None) -> ProbeResult:
    """Find nvcc, cuBLAS and an architecture, compile for it, and look at driver and GPU."""
    try:
        toolkit = cuda.find(environ)
        nvidia.prove(toolkit, compiler.find().cxx)
    except KvError as error:
        nvcc = cuda.compiler(environ)
        return ProbeResult("cuda", "optional", str(nvcc or "none"), str(error))
    shown = f"nvcc {toolkit.version} for {toolkit.architecture} ({toolkit.nvcc})"
    driver = nvidia.driver(environ)
    if driver is None:
        hint = "builds only; to run it, install the NVIDIA driver (on a machine with the GPU)"
        return ProbeResult("cuda", "optional", f"{shown}; no driver", hint)
    shown += f"; driver {driver.version} for CUDA {driver.cuda} and {driver.gpus or 'no GPU'}"
    lacks = nvidia.mismatch(toolkit, driver)
    return ProbeResult("cuda", "optional" if lacks else "ok", shown, lacks)


def metal() -> ProbeResult:
    """Return whether Metal can be built: it needs a Mac with the Command Line Tools."""
    if sys.platform != "darwin":
        hint = "build on a Mac; these options are untested"
        return ProbeResult("metal", "optional", f"none on {sys.platform}", hint)
    if shutil.which("xcrun") is None:
        return ProbeResult("metal", "optional", "no Command Line Tools", "xcode-select --install")
    return ProbeResult("metal", "optional", "Command Line Tools", "never run by us; please report")


def vulkan(environ: Mapping[str, str] | None = None) -> ProbeResult:
    """Probe the tools for building with Vulkan, then a loader and a driver."""
    env = os.environ if environ is None else environ
    lacks = backend.vulkan_missing(env)
    if lacks:
        return ProbeResult("vulkan", "optional", f"no {lacks}", backend.VULKAN_HINT)
    if ctypes.util.find_library("vulkan") is None:
        hint = "to run it: apt-get install libvulkan1"
        return ProbeResult("vulkan", "optional", "headers and glslc, but no loader", hint)
    devices = vulkan_devices(env)
    if not devices and not _drivers(env):
        hint = (
            "to run it: install your GPU's driver, or a software device: "
            "apt-get install mesa-vulkan-drivers"
        )
        return ProbeResult("vulkan", "optional", "headers, glslc and loader, but no driver", hint)
    shown = f"headers, glslc; {', '.join(devices) or 'a driver'}"
    if backend.vulkan_missing(env, spirv=True):
        hint = f"for later releases SPIRV-Headers as well: {backend.VULKAN_HINT}"
        return ProbeResult("vulkan", "optional", f"{shown}; no SPIRV-Headers", hint)
    return ProbeResult("vulkan", "ok", shown)


def vulkan_devices(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the devices that `vulkaninfo` reports; nothing without it."""
    said = cuda.program_output("vulkaninfo", "--summary", env=environ)
    return re.findall(r"^\s*deviceName\s*=\s*(.+?)\s*$", said, re.M)


def _drivers(env: Mapping[str, str]) -> bool:
    named = [Path(p) for v in _DRIVER_VARIABLES for p in env.get(v, "").split(os.pathsep) if p]
    found = [path for folder in _DRIVERS for path in Path(folder).glob("*.json")]
    return any(path.exists() for path in (*named, *found)) or sys.platform == "darwin"
