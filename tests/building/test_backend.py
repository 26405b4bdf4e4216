"""Each backend has its CMake options, and reports missing requirements."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from building_kit import script

from pyllamakv.building import backend, compiler
from pyllamakv.errors import ToolMissing, Unsupported, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_cpu_contains_rpc_and_no_other_device() -> None:
    """A CPU build has RPC, and does not search for GPU, BLAS, OpenMP or RDMA libraries."""
    options = backend.choose("cpu").options
    assert options["GGML_RPC"] == "ON"
    for name in ("CUDA", "METAL", "VULKAN", "BLAS", "OPENMP", "RPC_RDMA", "CUDA_NCCL"):
        assert options[f"GGML_{name}"] == "OFF"


def test_rpc_is_the_cpu_build() -> None:
    """The spec of RPC resolves to the CPU variant."""
    assert backend.choose("rpc") == backend.choose("cpu")


def test_portable_build_lists_its_instruction_sets() -> None:
    """A portable build sets its instruction sets explicitly, overriding upstream's defaults."""
    assert backend.choose("cpu").options["GGML_NATIVE"] == "ON"
    portable = backend.choose("cpu", native=False, machine="x86_64").options
    assert portable["GGML_NATIVE"] == "OFF"
    assert portable["GGML_AVX2"] == portable["GGML_FMA"] == "ON"
    other = backend.choose("cpu", native=False, machine="aarch64").options
    assert "GGML_AVX2" not in other


def test_a_portable_build_records_every_flag_that_its_options_imply() -> None:
    """The compiler's macros for the options of llama.cpp are the recorded CPU features."""
    cxx = compiler.find().cxx
    words = ["-msse4.2", "-mavx", "-mavx2", "-mfma", "-mf16c", "-mbmi2"]
    assert len(words) == len(backend._PORTABLE_X86)
    asked = subprocess.run(
        [cxx, *words, "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        pytest.skip("this compiler is for another processor")
    defined = {line.split()[1] for line in asked.stdout.splitlines()}
    flags = {flag for macro, flag in compiler._MACROS.items() if macro in defined}
    assert flags == set(backend.PORTABLE_FLAGS_X86)


def test_unknown_backend_error_lists_known_backends() -> None:
    """An unknown backend is refused with the list of known ones."""
    with pytest.raises(UsageError, match="cpu, rpc, cuda, metal, vulkan"):
        backend.choose("abacus")


def test_metal_is_refused_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal is refused on other systems; on macOS its kernels are embedded."""
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(Unsupported, match="macOS"):
        backend.choose("metal")
    monkeypatch.setattr(sys, "platform", "darwin")
    options = backend.choose("metal").options
    assert options["GGML_METAL"] == options["GGML_METAL_EMBED_LIBRARY"] == "ON"


def test_missing_shader_compiler_error_names_the_package(tmp_path: Path) -> None:
    """A missing shader compiler is named with its hint; a complete SDK is accepted."""
    env = {"PATH": str(tmp_path / "bin"), "VULKAN_SDK": str(tmp_path / "sdk")}
    with pytest.raises(ToolMissing, match=r"glslc.*apt-get install libvulkan-dev"):
        backend.choose("vulkan", environ=env)
    script(tmp_path / "sdk" / "bin" / "glslc", "exit 0\n")
    (tmp_path / "sdk" / "include" / "vulkan").mkdir(parents=True)
    (tmp_path / "sdk" / "include" / "vulkan" / "vulkan.h").touch()
    assert backend.choose("vulkan", environ=env).options["GGML_VULKAN"] == "ON"


def test_vulkan_names_the_headers_that_a_release_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases build without SPIRV-Headers; later ones fail to configure."""
    monkeypatch.setattr(backend, "_ROOTS", ())
    sdk, tree = tmp_path / "sdk", tmp_path / "tree"
    env = {"PATH": "", "VULKAN_SDK": str(sdk)}
    script(sdk / "bin" / "glslc", "exit 0\n")
    (sdk / "include" / "vulkan").mkdir(parents=True)
    (sdk / "include" / "vulkan" / "vulkan.h").touch()
    asks = tree / "ggml/src/ggml-vulkan/CMakeLists.txt"
    asks.parent.mkdir(parents=True)
    asks.write_text("find_package(Vulkan REQUIRED)\n", encoding="utf-8")
    backend.need_spirv(tree, env)
    backend.need_spirv(tmp_path / "monolith", env)
    asks.write_text("find_package(SPIRV-Headers CONFIG REQUIRED)\n", encoding="utf-8")
    with pytest.raises(ToolMissing, match=r"SPIRV-Headers.*spirv-headers"):
        backend.need_spirv(tree, env)
    found = sdk / "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    found.parent.mkdir(parents=True)
    found.touch()
    backend.need_spirv(tree, env)


def test_cuda_options_contain_no_toolkit_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options contain what changes the code, but no paths of tools."""
    root = tmp_path / "cuda"
    script(root / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (root / "include").mkdir()
    (root / "include" / "cublas_v2.h").touch()
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    env = {"PATH": "", "CUDA_HOME": str(root), "PYLLAMAKV_CUDA_ARCH": "90-real"}
    chosen = backend.choose("cuda", environ=env)
    assert chosen.options["GGML_CUDA"] == "ON"
    assert chosen.options["CMAKE_CUDA_ARCHITECTURES"] == "90-real"
    assert str(tmp_path) not in "".join(chosen.options.values())
    assert chosen.tool_paths["CMAKE_CUDA_COMPILER"] == str(root / "bin" / "nvcc")
