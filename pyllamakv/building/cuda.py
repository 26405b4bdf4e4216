"""Find a CUDA toolkit, installed in the system or from wheels, and the GPU's architecture.

The architecture is never left to upstream: older releases default to some that CUDA 13 refuses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import ToolMissing, UsageError
from pyllamakv.home import home
from pyllamakv.source.files import locked

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Variable with the architecture for machines without a GPU, such as `90-real` or `86;90`.
ARCHITECTURE = "PYLLAMAKV_CUDA_ARCH"

#: Default directory of the toolkit's installer.
USUAL = Path("/usr/local/cuda")

_PIP = f"{shlex.quote(sys.executable)} -m pip install"

#: The toolkit wheels, which the extra `cuda` installs.
WHEELS = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cublas==13.1.*",
)

# Only wheels of the interpreter that builds are found.
_HINT = (
    "install the CUDA toolkit of your system, or its wheels (the extra `cuda` of pyllamakv): "
    f"`{_PIP} {shlex.join(WHEELS)}`"
)
_ARCHITECTURE = re.compile(r"\d{2,3}[af]?(-real|-virtual)?(;\d{2,3}[af]?(-real|-virtual)?)*")


@dataclass(frozen=True)
class Toolkit:
    """The CMake variables of a toolkit: those in a variant's id, and the others."""

    nvcc: Path
    version: str
    options: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Return the target of the toolkit."""
        return self.options["CMAKE_CUDA_ARCHITECTURES"]


def find(environ: Mapping[str, str] | None = None) -> Toolkit:
    """Return the toolkit and the architecture; raise ToolMissing or UsageError with the hint."""
    env = os.environ if environ is None else environ
    nvcc = compiler(env)
    if nvcc is None:
        raise ToolMissing(
            f"the CUDA backend needs nvcc, which was not found; {_HINT}", "nvcc", _HINT
        )
    version = _version(nvcc)
    root = _root(nvcc)
    wanted = architecture(env)
    _known(nvcc, version, wanted)
    options = {"CMAKE_CUDA_ARCHITECTURES": wanted, "PLK_CUDA_VERSION": version}
    places = {"CMAKE_CUDA_COMPILER": str(nvcc), "CUDAToolkit_ROOT": str(root)}
    places |= _cublas(root, version)
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
    wheel = next((root for root in _wheel_roots() if (root / "bin/nvcc").is_file()), None)
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
    said = program_output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", env=env)
    found = sorted({cap.replace(".", "") for cap in re.findall(r"^\s*(\d+\.\d)\s*$", said, re.M)})
    if not found:
        raise UsageError(
            "no GPU reports its CUDA "
            f"architecture (nvidia-smi lists none); set it: {ARCHITECTURE}=90-real pyllamakv "
            f"build RELEASE --backend cuda"
        )
    return ";".join(f"{cap}-real" for cap in found)


def _known(nvcc: Path, version: str, wanted: str) -> None:
    """Raise UsageError when a toolkit does not know an architecture."""
    known = sorted(
        set(
            map(
                int,
                re.findall(r"^compute_(\d+)", program_output(str(nvcc), "--list-gpu-arch"), re.M),
            )
        )
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
    """Arrange the files of the wheels as a toolkit in the data directory, using hard links.

    The wheels lack names that compilers and linkers need: `lib64` and names without versions.
    Returns the toolkit's directory, one per set of installed wheels, created atomically.
    """
    site = root.parents[1]
    wheels = sorted(path.name for path in site.glob("nvidia_*.dist-info"))
    digest = hashlib.sha256("\n".join([str(root), *wheels]).encode()).hexdigest()[:12]
    folder = home() / "objects" / f"cuda-{root.name}-{digest}"
    if folder.is_dir():
        return folder
    with locked(home() / "locks" / f"{folder.name}.lock"):
        if not folder.is_dir():
            stage = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(stage, ignore_errors=True)
            _lay_out(root, stage)
            stage.rename(folder)
    return folder


def _lay_out(root: Path, folder: Path) -> None:
    shutil.copytree(root, folder, copy_function=_link_or_copy, symlinks=False)
    lib = folder / "lib"
    lib.mkdir(exist_ok=True)
    for path in sorted(lib.glob("*.so.*")):
        plain = lib / (path.name.split(".so.", 1)[0] + ".so")
        if not plain.exists():
            plain.symlink_to(path.name)
    if not (folder / "lib64").exists():
        (folder / "lib64").symlink_to("lib")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _wheel_roots() -> list[Path]:
    """Return the directories of toolkits from wheels, the newest first: `nvidia/cu13`."""
    found = [
        (int(root.name[2:]), root)
        for place in _wheel_folders()
        for root in place.glob("cu[0-9]*")
        if root.name[2:].isdigit()
    ]
    return [root for _, root in sorted(found, reverse=True)]


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _behind_script(nvcc: Path) -> Path:
    """Return the nvcc that a wrapper script calls, because CMake uses its directory."""
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
    match = re.search(r"release \d+\.\d+, V([\d.]+)", program_output(str(nvcc), "--version"))
    if match is None:
        raise ToolMissing(f"{nvcc} does not report its version like nvcc; {_HINT}", "nvcc", _HINT)
    return match.group(1)


def _cublas(root: Path, version: str) -> dict[str, str]:
    if _first(root, ("include", "targets/*/include"), "cublas_v2.h"):
        return {}
    # Another major version has another interface. The wheels of CUDA 12 use `nvidia/cublas`.
    major = version.partition(".")[0]
    older = [place / "cublas" for place in _wheel_folders()]
    for wheel in (*_wheel_roots(), *older):
        named = {name: wheel / "lib" / f"lib{name}.so.{major}" for name in ("cublas", "cublasLt")}
        if (wheel / "include/cublas_v2.h").is_file() and all(map(Path.is_file, named.values())):
            places = {f"CUDA_{name}_LIBRARY": str(library) for name, library in named.items()}
            return {"CMAKE_CUDA_FLAGS": f"-I{wheel / 'include'}", **places}
    wheel_name = "nvidia-cublas-cu12" if major == "12" else f"'nvidia-cublas=={major}.*'"
    hint = f"install it with the toolkit, or its wheel: `{_PIP} {wheel_name}`"
    message = f"the CUDA backend needs cuBLAS of CUDA {major}, which is not in {root}; {hint}"
    raise ToolMissing(message, "cublas", hint)


def _first(root: Path, folders: tuple[str, ...], name: str) -> Path | None:
    return next((path for folder in folders for path in root.glob(f"{folder}/{name}")), None)


def _system_driver() -> bool:
    if sys.platform == "darwin":
        return False
    folders = (Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu"))
    return any((folder / "libcuda.so").exists() for folder in folders)


def program_output(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a program, or nothing if it is missing or fails."""
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
