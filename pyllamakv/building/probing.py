"""Probe what each backend needs, to build and to run, and name the cure of what lacks."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyllamakv.building import backend, compiler, cuda, nvidia
from pyllamakv.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Mapping


State = Literal["ok", "missing", "optional"]


@dataclass(frozen=True)
class ProbeResult:
    """Say what was looked for, what was found, and what to do if that is not enough.

    ``state`` is "optional" for what lacks without hurting the main job.
    """

    name: str
    state: State
    found: str
    cure: str = ""


#: Where drivers of Vulkan announce themselves.
_DRIVERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_DRIVER_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")


def cpu() -> ProbeResult:
    """Say which processor a build is tuned for."""
    try:
        flags = compiler.find().native_flags
    except KvError as error:
        return ProbeResult("cpu", "optional", "cannot be told without a compiler", str(error))
    best = next((name for name in ("avx512f", "avx2", "avx", "asimddp") if name in flags), "plain")
    return ProbeResult("cpu", "ok", f"{platform.machine()} with {best}; --portable leaves it out")


def rpc() -> ProbeResult:
    """Try to listen on loopback; the backend itself is in every CPU build."""
    try:
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            place.listen()
    except OSError as error:
        cure = "allow this process to listen on 127.0.0.1"
        return ProbeResult("rpc", "optional", f"no loopback: {error}", cure)
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
        cure = "it builds here; to run it, install the NVIDIA driver (on a machine with the GPU)"
        return ProbeResult("cuda", "optional", f"{shown}; no driver", cure)
    shown += f"; driver {driver.version} for CUDA {driver.cuda} and {driver.gpus or 'no GPU'}"
    lacks = nvidia.mismatch(toolkit, driver)
    return ProbeResult("cuda", "optional" if lacks else "ok", shown, lacks)


def metal() -> ProbeResult:
    """Say whether Metal can be built for: it needs a Mac and the Command Line Tools alone."""
    if sys.platform != "darwin":
        cure = "build on a Mac; the options are written for one, and were never run"
        return ProbeResult("metal", "optional", f"none on {sys.platform}", cure)
    if shutil.which("xcrun") is None:
        return ProbeResult("metal", "optional", "no Command Line Tools", "xcode-select --install")
    return ProbeResult("metal", "optional", "Command Line Tools", "never run by us; please report")


def vulkan(environ: Mapping[str, str] | None = None) -> ProbeResult:
    """Look for what builds for Vulkan, then for a loader and a driver."""
    env = os.environ if environ is None else environ
    lacks = backend.vulkan_missing(env)
    if lacks:
        return ProbeResult("vulkan", "optional", f"no {lacks}", backend.VULKAN_CURE)
    if ctypes.util.find_library("vulkan") is None:
        cure = "to run it: apt-get install libvulkan1"
        return ProbeResult("vulkan", "optional", "headers and glslc, but no loader", cure)
    devices = vulkan_devices(env)
    if not devices and not _drivers(env):
        cure = (
            "to run it: install your GPU's driver, or a software device: "
            "apt-get install mesa-vulkan-drivers"
        )
        return ProbeResult("vulkan", "optional", "headers, glslc and loader, but no driver", cure)
    shown = f"headers, glslc; {', '.join(devices) or 'a driver'}"
    if backend.vulkan_missing(env, spirv=True):
        cure = f"for later releases SPIRV-Headers as well: {backend.VULKAN_CURE}"
        return ProbeResult("vulkan", "optional", f"{shown}; no SPIRV-Headers", cure)
    return ProbeResult("vulkan", "ok", shown)


def vulkan_devices(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the devices as `vulkaninfo` tells them; nothing without it."""
    said = cuda.ask("vulkaninfo", "--summary", env=environ)
    return re.findall(r"^\s*deviceName\s*=\s*(.+?)\s*$", said, re.M)


def _drivers(env: Mapping[str, str]) -> bool:
    named = [Path(p) for v in _DRIVER_VARIABLES for p in env.get(v, "").split(os.pathsep) if p]
    found = [path for folder in _DRIVERS for path in Path(folder).glob("*.json")]
    return any(path.exists() for path in (*named, *found)) or sys.platform == "darwin"
