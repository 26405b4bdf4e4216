"""Find a CUDA toolkit, installed in the system or from wheels, and the GPU's architecture.

The architecture is never left to upstream: older releases default to some that CUDA 13 refuses.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import ToolMissing, UsageError
from pyllamakv.home import home

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Names the architecture where no GPU can be asked, for example `90-real` or `86;90`.
ARCHITECTURE = "PYLLAMAKV_CUDA_ARCH"

#: Where the vendor's installer puts the toolkit.
USUAL = Path("/usr/local/cuda")

_CURE = (
    "install the CUDA toolkit of your system, or its wheels: `pip install nvidia-cuda-nvcc "
    "nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas`"
)
_CUBLAS_CURE = "install it with the toolkit, or its wheel: `pip install nvidia-cublas`"
_ARCHITECTURE = re.compile(r"\d{2,3}[af]?(-real|-virtual)?(;\d{2,3}[af]?(-real|-virtual)?)*")


@dataclass(frozen=True)
class Toolkit:
    """Hold the CMake variables of a toolkit: what enters a variant's id, and what does not."""

    nvcc: Path
    version: str
    options: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Return what it compiles for."""
        return self.options["CMAKE_CUDA_ARCHITECTURES"]


def find(environ: Mapping[str, str] | None = None) -> Toolkit:
    """Return the toolkit and the architecture; raise ToolMissing or UsageError with the cure."""
    env = os.environ if environ is None else environ
    nvcc = compiler(env)
    if nvcc is None:
        raise ToolMissing(
            f"the CUDA backend needs nvcc, which was not found; {_CURE}", "nvcc", _CURE
        )
    version = _version(nvcc)
    root = _root(nvcc)
    wanted = architecture(env)
    _known(nvcc, version, wanted)
    options = {"CMAKE_CUDA_ARCHITECTURES": wanted, "PLK_CUDA_VERSION": version}
    places = {"CMAKE_CUDA_COMPILER": str(nvcc), "CUDAToolkit_ROOT": str(root)}
    places |= _cublas(root)
    driver = _first(root, ("lib64/stubs", "targets/*/lib/stubs", "lib/stubs"), "libcuda.so")
    if driver:
        places["CUDA_cuda_driver_LIBRARY"] = str(driver)
    elif not _system_driver():
        # Virtual memory is the one part that calls the driver directly.
        options["GGML_CUDA_NO_VMM"] = "ON"
    return Toolkit(nvcc, version, options, places)


def compiler(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return nvcc's path: from the environment, PATH, the usual folder, or wheels."""
    env = os.environ if environ is None else environ
    candidates = [Path(env["CUDACXX"])] if env.get("CUDACXX") else []
    candidates += [
        Path(env[name]) / "bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)
    ]
    on_path = shutil.which("nvcc", path=env.get("PATH", os.defpath))
    candidates += [Path(on_path)] if on_path else []
    candidates.append(USUAL / "bin/nvcc")
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return _behind_script(candidate)
    wheel = _wheel_root("bin/nvcc")
    return prepare_wheels(wheel) / "bin/nvcc" if wheel else None


def architecture(environ: Mapping[str, str] | None = None) -> str:
    """Return the architecture for CMake: the one named in the environment, else the GPUs' own."""
    env = os.environ if environ is None else environ
    named = env.get(ARCHITECTURE, "").strip()
    if named:
        if not _ARCHITECTURE.fullmatch(named):
            raise UsageError(
                f"{ARCHITECTURE} must name CUDA architectures (90-real, 86;90), found {named!r}"
            )
        return named
    said = ask("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", env=env)
    found = sorted({cap.replace(".", "") for cap in re.findall(r"^\s*(\d+\.\d)\s*$", said, re.M)})
    if not found:
        raise UsageError(
            "no GPU could be asked for its CUDA architecture (nvidia-smi names none); "
            f"name it: {ARCHITECTURE}=90-real pyllamakv build RELEASE --backend cuda"
        )
    return ";".join(f"{cap}-real" for cap in found)


def _known(nvcc: Path, version: str, wanted: str) -> None:
    """Raise UsageError when a toolkit does not know an architecture."""
    known = sorted(
        set(map(int, re.findall(r"^compute_(\d+)", ask(str(nvcc), "--list-gpu-arch"), re.M)))
    )
    named = [int(number) for number in re.findall(r"\d+", wanted)]
    strange = [number for number in named if number not in known]
    if known and strange:
        raise UsageError(
            f"nvcc {version} does not compile for architecture {strange[0]}, but for "
            f"{', '.join(map(str, known))}: name one of these in {ARCHITECTURE}, or install a "
            "toolkit that has it"
        )


def prepare_wheels(root: Path) -> Path:
    """Lay out the wheels' files below the home as a toolkit, by hard links where possible.

    The wheels lack what compilers and linkers look for: `lib64` and names without versions.
    Idempotent; returns the toolkit's folder.
    """
    folder = home() / "objects" / f"cuda-{root.parent.name}-{root.name}"
    done = folder / ".complete"
    if done.is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root, folder, copy_function=_link_or_copy, symlinks=False)
    lib = folder / "lib"
    lib.mkdir(exist_ok=True)
    for path in sorted(lib.glob("*.so.*")):
        plain = lib / (path.name.split(".so.", 1)[0] + ".so")
        if not plain.exists():
            plain.symlink_to(path.name)
    if not (folder / "lib64").exists():
        (folder / "lib64").symlink_to("lib")
    done.touch()
    return folder


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _wheel_root(name: str) -> Path | None:
    for place in _wheel_folders():
        for found in sorted(place.glob(f"*/{name}"), reverse=True):
            return found.parents[len(Path(name).parts) - 1]
    return None


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _behind_script(nvcc: Path) -> Path:
    """Return the real nvcc behind a two-line script that calls it, since CMake reads its folder."""
    real = nvcc.resolve()
    try:
        with real.open("rb") as file:
            head = file.read(512)
    except OSError:
        return nvcc
    match = re.search(rb"^exec\s+\"?(/\S+?/nvcc)\"?\s", head, re.M) if head[:2] == b"#!" else None
    named = Path(os.fsdecode(match.group(1))) if match else real
    return named if named.is_file() else nvcc


def _root(nvcc: Path) -> Path:
    return nvcc.parent.parent


def _version(nvcc: Path) -> str:
    match = re.search(r"release \d+\.\d+, V([\d.]+)", ask(str(nvcc), "--version"))
    if match is None:
        raise ToolMissing(f"{nvcc} does not tell its version as nvcc does; {_CURE}", "nvcc", _CURE)
    return match.group(1)


def _cublas(root: Path) -> dict[str, str]:
    if _first(root, ("include", "targets/*/include"), "cublas_v2.h"):
        return {}
    wheel = _wheel_root("include/cublas_v2.h")
    if wheel is None:
        message = f"the CUDA backend needs cuBLAS, which is not in {root}; {_CUBLAS_CURE}"
        raise ToolMissing(message, "cublas", _CUBLAS_CURE)
    places = {"CMAKE_CUDA_FLAGS": f"-I{wheel / 'include'}"}
    for name in ("cublas", "cublasLt"):
        library = next(iter(sorted((wheel / "lib").glob(f"lib{name}.so*"))), None)
        if library is None:
            message = f"expected lib{name} in {wheel / 'lib'}, found none; {_CUBLAS_CURE}"
            raise ToolMissing(message, "cublas", _CUBLAS_CURE)
        places[f"CUDA_{name}_LIBRARY"] = str(library)
    return places


def _first(root: Path, folders: tuple[str, ...], name: str) -> Path | None:
    return next((path for folder in folders for path in root.glob(f"{folder}/{name}")), None)


def _system_driver() -> bool:
    if sys.platform == "darwin":
        return False
    folders = (Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu"))
    return any((folder / "libcuda.so").exists() for folder in folders)


def ask(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return what a program prints, or nothing when it is absent or fails."""
    program = shutil.which(command[0], path=env.get("PATH", os.defpath) if env else None)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
