"""The backends: their CMake options, and checks of the tools on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import cuda
from pyllamakv.errors import ToolMissing, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Names of backends. RPC is part of every CPU build, so `rpc` needs no separate build.
NAMES = ("cpu", "rpc", "cuda", "metal", "vulkan")

#: Options of every build: only the requested devices, and no libraries found by accident.
_COMMON = {
    "GGML_RPC": "ON",
    "GGML_CUDA": "OFF",
    "GGML_METAL": "OFF",
    "GGML_VULKAN": "OFF",
    "GGML_BLAS": "OFF",
    "GGML_ACCELERATE": "OFF",
    # Later releases enable these if their libraries are installed.
    "GGML_RPC_RDMA": "OFF",
    "GGML_CUDA_NCCL": "OFF",
    # Waiting OpenMP threads spin, which is slow on a loaded machine.
    "GGML_OPENMP": "OFF",
}

#: Without `native`, these are set explicitly: upstream disables them if SOURCE_DATE_EPOCH is set,
#: which makes a library several times slower.
_PORTABLE_X86 = {
    "GGML_SSE42": "ON",
    "GGML_AVX": "ON",
    "GGML_AVX2": "ON",
    "GGML_FMA": "ON",
    "GGML_F16C": "ON",
    "GGML_BMI2": "ON",
}

#: The CPU flags that a portable x86 build may use. The options of the instruction sets above imply
#: SSE3, SSSE3, SSE4.1 and POPCNT.
PORTABLE_FLAGS_X86 = (
    "avx",
    "avx2",
    "bmi2",
    "f16c",
    "fma",
    "pni",
    "popcnt",
    "sse4_1",
    "sse4_2",
    "ssse3",
)

VULKAN_HINT = (
    "install the Vulkan SDK: Debian or Ubuntu "
    "`apt-get install libvulkan-dev glslc spirv-headers mesa-vulkan-drivers`"
)
#: Directories of headers and packages besides the SDK.
_ROOTS = ("/usr", "/usr/local", "/opt/homebrew")

#: Directories of CMake packages below a root.
_PACKAGES = ("share/cmake", "lib/cmake", "lib/*/cmake")

#: Option -> its devices.
_DEVICES = {
    "GGML_CUDA": "CUDA",
    "GGML_METAL": "Metal",
    "GGML_VULKAN": "Vulkan",
    "GGML_RPC": "RPC",
}


@dataclass(frozen=True)
class Backend:
    """A backend that is ready to build: its name, CMake options, and paths.

    ``options`` influence the result and are part of the variant's id. ``tool_paths`` are CMake
    variables with the paths of tools on this machine, which no id records.
    """

    name: str
    options: dict[str, str]
    tool_paths: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Name the kinds of device that K and V can lie on, the processor's host memory first."""
        return ("CPU", *(kind for option, kind in _DEVICES.items() if self.options[option] == "ON"))

    def extended(self, options: Mapping[str, str], paths: Mapping[str, str]) -> Backend:
        """Return the backend with more options and paths."""
        return Backend(self.name, {**self.options, **options}, {**self.tool_paths, **paths})


def known(name: str) -> str:
    """Return ``name``, or raise UsageError when it is no backend."""
    if name not in NAMES:
        raise UsageError(f"there is no backend {name!r}: expected one of {', '.join(NAMES)}")
    return name


def canonical(name: str) -> str:
    """Return the backend that is built for ``name``; raise UsageError for an unknown one."""
    return "cpu" if known(name) == "rpc" else name


def choose(
    name: str,
    *,
    native: bool = True,
    machine: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Backend:
    """Return the backend's options for this machine, after looking for the tools that it needs.

    ``native`` tunes for this processor; without it x86 gets AVX2, FMA, F16C and BMI2. Raises
    ToolMissing with the install command, Unsupported if the platform lacks the backend, and
    UsageError for an unknown name or an unknown CUDA architecture.
    """
    env = os.environ if environ is None else environ
    real = canonical(name)
    options = {**_COMMON, "GGML_NATIVE": "ON" if native else "OFF"}
    if not native and (machine or os.uname().machine) in {"x86_64", "amd64"}:
        options |= _PORTABLE_X86
    places: dict[str, str] = {}
    if real == "cuda":
        toolkit = cuda.find(env)
        options |= {"GGML_CUDA": "ON", **toolkit.options}
        places = toolkit.places
    elif real == "metal":
        options |= _metal()
    elif real == "vulkan":
        _need_vulkan(env)
        options["GGML_VULKAN"] = "ON"
    return Backend(real, options, places)


def _metal() -> dict[str, str]:
    if sys.platform != "darwin":
        raise Unsupported(
            f"Metal exists on macOS only, this is {sys.platform}; choose --backend cpu", "metal"
        )
    return {
        "GGML_METAL": "ON",
        # Kernels embedded as source need only the Command Line Tools, not all of Xcode.
        "GGML_METAL_EMBED_LIBRARY": "ON",
        "CMAKE_OSX_DEPLOYMENT_TARGET": "13.3",
    }


def vulkan_missing(environ: Mapping[str, str] | None = None, *, spirv: bool = False) -> str:
    """Return what this machine lacks to build for Vulkan, or an empty text.

    ``spirv`` includes the SPIRV-Headers, which later releases need: see `need_spirv`.
    """
    env = os.environ if environ is None else environ
    sdk = env.get("VULKAN_SDK")
    roots = [Path(root) for root in ((sdk,) if sdk else ()) + _ROOTS]
    path = env.get("PATH", os.defpath) + (f"{os.pathsep}{sdk}/bin" if sdk else "")
    lacks = []
    if not any((root / "include/vulkan/vulkan.h").is_file() for root in roots):
        lacks.append("vulkan/vulkan.h")
    if shutil.which("glslc", path=path) is None:
        lacks.append("glslc")
    asked = "SPIRV-Headers*/SPIRV-HeadersConfig.cmake"
    if spirv and not any(
        any(root.glob(f"{place}/{asked}")) for root in roots for place in _PACKAGES
    ):
        lacks.append("SPIRV-Headers")
    return " and ".join(lacks)


def need_spirv(tree: Path, environ: Mapping[str, str] | None = None) -> None:
    """Raise ToolMissing if a release requires SPIRV-Headers and they are missing."""
    asks = tree / "ggml/src/ggml-vulkan/CMakeLists.txt"
    if asks.is_file() and "SPIRV-Headers" in asks.read_text(encoding="utf-8", errors="replace"):
        _need_vulkan(os.environ if environ is None else environ, spirv=True)


def _need_vulkan(env: Mapping[str, str], *, spirv: bool = False) -> None:
    lacks = vulkan_missing(env, spirv=spirv)
    if lacks:
        message = f"the Vulkan backend needs {lacks}, which was not found; {VULKAN_HINT}"
        raise ToolMissing(message, lacks.split(" ", 1)[0], VULKAN_HINT)
