"""Test CUDA toolkits of the system and of wheels, and the selection of the architecture."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from building_kit import script

from pyllamakv.building import cuda
from pyllamakv.errors import ToolMissing, UsageError

ROOT = Path(__file__).resolve().parents[2]

NVCC = "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the toolkit and the wheels of this machine."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cuda, "USUAL", tmp_path / "usual")
    monkeypatch.setattr(cuda, "_wheel_folders", list)


def toolkit(root: Path, *, cublas: bool = True) -> dict[str, str]:
    """Write a fake toolkit and return the environment that names it."""
    script(root / "bin" / "nvcc", NVCC)
    (root / "include").mkdir(parents=True)
    if cublas:
        (root / "include" / "cublas_v2.h").touch()
    return {"PATH": "", "CUDA_HOME": str(root), cuda.ARCHITECTURE: "90-real"}


def test_missing_nvcc_names_the_wheels(tmp_path: Path) -> None:
    """The error for a missing nvcc names the wheels for the interpreter in use."""
    pattern = re.escape(f"{shlex.quote(sys.executable)} -m pip install 'nvidia-cuda-nvcc")
    with pytest.raises(ToolMissing, match=pattern):
        cuda.find({"PATH": str(tmp_path)})


def test_cuda_extra_equals_the_wheels_of_the_error() -> None:
    """Both lists are equal."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tuple(project["optional-dependencies"]["cuda"]) == cuda.WHEELS


def test_system_toolkit_reports_version_and_paths(tmp_path: Path) -> None:
    """A toolkit of the system reports version, architecture and paths."""
    found = cuda.find(toolkit(tmp_path / "cuda"))
    assert found.version == "13.0.88"
    assert found.options["CMAKE_CUDA_ARCHITECTURES"] == "90-real"
    assert found.places["CUDAToolkit_ROOT"] == str(tmp_path / "cuda")


def test_missing_driver_stub_disables_memory_mapping(tmp_path: Path) -> None:
    """With the toolkit's stub the driver's library is linked; without it memory mapping is off."""
    env = toolkit(tmp_path / "cuda")
    stub = tmp_path / "cuda" / "lib64" / "stubs" / "libcuda.so"
    stub.parent.mkdir(parents=True)
    stub.touch()
    found = cuda.find(env)
    assert found.places["CUDA_cuda_driver_LIBRARY"] == str(stub)
    assert "GGML_CUDA_NO_VMM" not in found.options


def test_nvcc_wrapper_script_is_resolved_to_its_toolkit(tmp_path: Path) -> None:
    """A script on PATH that calls nvcc is resolved: CMake needs the real directory."""
    toolkit(tmp_path / "cuda")
    script(tmp_path / "bin" / "nvcc", "")
    text = f'#!/bin/sh\nexec {tmp_path}/cuda/bin/nvcc "$@"\n'
    (tmp_path / "bin" / "nvcc").write_text(text, encoding="utf-8")
    assert cuda.compiler({"PATH": str(tmp_path / "bin")}) == tmp_path / "cuda/bin/nvcc"


def test_toolkit_without_cublas_names_the_package(tmp_path: Path) -> None:
    """A toolkit without cuBLAS is refused, and the error names the package to install."""
    with pytest.raises(ToolMissing, match=r"pip install 'nvidia-cublas==13\.\*'"):
        cuda.find(toolkit(tmp_path / "cuda", cublas=False))


def test_cublas_wheel_completes_a_system_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cuBLAS wheel completes a toolkit of the system."""
    wheel = tmp_path / "site" / "nvidia" / "cu13"
    (wheel / "include").mkdir(parents=True)
    (wheel / "include" / "cublas_v2.h").touch()
    (wheel / "lib").mkdir()
    older = wheel.parent / "cublas"
    shutil.copytree(wheel, older)
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: [wheel.parent])
    for name in ("libcublas.so", "libcublasLt.so"):
        (older / "lib" / f"{name}.12").touch()
    env = toolkit(tmp_path / "cuda", cublas=False)
    with pytest.raises(ToolMissing, match="cuBLAS of CUDA 13"):
        cuda.find(env)
    for name in ("libcublas.so", "libcublasLt.so"):
        (wheel / "lib" / f"{name}.13").touch()
    places = cuda.find(env).places
    assert places["CUDA_cublas_LIBRARY"] == str(wheel / "lib" / "libcublas.so.13")
    assert places["CUDA_cublasLt_LIBRARY"] == str(wheel / "lib" / "libcublasLt.so.13")


def test_wheels_are_laid_out_as_a_toolkit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout has lib64 and names without versions, and is created once."""
    wheel = tmp_path / "site" / "nvidia" / "cu13"
    toolkit(wheel)
    (wheel / "lib").mkdir()
    (wheel / "lib" / "libcudart.so.13").write_bytes(b"library")
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: [wheel.parent])
    env = {"PATH": "", cuda.ARCHITECTURE: "90-real"}
    found = cuda.find(env)
    root = found.nvcc.parent.parent
    assert root.is_relative_to(tmp_path / "home")
    assert (root / "lib64" / "libcudart.so").read_bytes() == b"library"
    assert cuda.find(env) == found


def wheels(site: Path, version: str, root: str = "cu13") -> Path:
    """Install fake wheels of a version into a directory, and return `nvidia`."""
    place = site / "nvidia" / root
    if not place.exists():
        toolkit(place)
        (place / "lib").mkdir()
    for old in site.glob("nvidia_*.dist-info"):
        old.rmdir()
    (site / f"nvidia_cuda_runtime-{version}.dist-info").mkdir()
    (place / "lib" / "libcudart.so.13").unlink(missing_ok=True)
    (place / "lib" / "libcudart.so.13").write_text(version, encoding="utf-8")
    return place.parent


def test_upgraded_wheels_are_laid_out_as_a_new_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade has a new layout; an incomplete one of a killed process is not used."""
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: [wheels(tmp_path, "13.0.96")])
    first = cuda.compiler({"PATH": ""})
    assert first is not None
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: [wheels(tmp_path, "13.0.97")])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cuda, "_link_or_copy", Mock(side_effect=KeyboardInterrupt))
        cuda.compiler({"PATH": ""})
    second = cuda.compiler({"PATH": ""})
    assert second is not None
    versions = [
        (path.parents[1] / "lib64/libcudart.so").read_text("utf-8") for path in (first, second)
    ]
    assert versions == ["13.0.96", "13.0.97"]
    assert not list((tmp_path / "home" / "objects").glob(".*"))


def test_concurrent_layout_of_wheels_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process waits, and finds a complete layout."""
    folder = wheels(tmp_path, "13.0.96")
    slow = cuda._link_or_copy

    def link(source: str, target: str) -> None:
        time.sleep(0.05)
        slow(source, target)

    monkeypatch.setattr(cuda, "_link_or_copy", link)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: cuda.prepare_wheels(folder / "cu13"), range(2)))
    assert made[0] == made[1]
    assert (made[0] / "lib64" / "libcudart.so").read_text("utf-8") == "13.0.96"


def test_wheel_toolkits_are_ordered_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are compared as numbers; directories of single CUDA 12 wheels are not toolkits."""
    for name in ("cu9", "cu13", "cuda_nvcc"):
        folder = wheels(tmp_path, "1", name)
    monkeypatch.setattr(cuda, "_wheel_folders", lambda: [folder])
    assert [root.name for root in cuda._wheel_roots()] == ["cu13", "cu9"]


@pytest.mark.parametrize("value", ["90", "90-real", "86;90-virtual", "90a-real"])
def test_environment_variable_sets_the_cuda_architecture(value: str) -> None:
    """The environment sets the architecture if there is no GPU."""
    assert cuda.architecture({"PATH": "", cuda.ARCHITECTURE: value}) == value


@pytest.mark.parametrize("value", ["hopper", "90 86", "native", "9"])
def test_invalid_cuda_architecture_is_refused(value: str) -> None:
    """Other values are refused before CMake runs."""
    with pytest.raises(UsageError, match="90-real"):
        cuda.architecture({"PATH": "", cuda.ARCHITECTURE: value})


def test_cuda_architecture_is_that_of_all_gpus(tmp_path: Path) -> None:
    """All GPUs of the machine are queried, and each compute capability is listed once."""
    script(tmp_path / "nvidia-smi", "printf '9.0\\n8.6\\n9.0\\n12.0\\n'\n")
    assert cuda.architecture({"PATH": str(tmp_path)}) == "120-real;86-real;90-real"


@pytest.mark.parametrize("body", ["echo 'No devices were found'; exit 6\n", "echo [N/A]\n"])
def test_unknown_cuda_architecture_is_refused_without_a_gpu(tmp_path: Path, body: str) -> None:
    """Without a GPU, the error asks for the architecture; no default is assumed."""
    script(tmp_path / "nvidia-smi", body)
    with pytest.raises(UsageError, match=cuda.ARCHITECTURE):
        cuda.architecture({"PATH": str(tmp_path)})


def test_program_without_nvcc_version_is_refused(tmp_path: Path) -> None:
    """A program that does not print a version of nvcc is refused."""
    env = toolkit(tmp_path / "cuda")
    script(tmp_path / "cuda" / "bin" / "nvcc", "echo hello\n")
    with pytest.raises(ToolMissing, match="does not report its version"):
        cuda.find(env)
