"""Missing requirements of an NVIDIA machine are reported before CMake runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from building_kit import script

from pyllamakv.building import build, cuda, doctor, nvidia
from pyllamakv.building.cuda import Toolkit
from pyllamakv.errors import ToolMissing, UsageError

SMI = """case $* in
*name*) printf 'NVIDIA H200\\nNVIDIA H200\\n' ;;
*) echo '| NVIDIA-SMI 580.1  Driver Version: 580.159.03  CUDA Version: 13.0 |' ;;
esac
"""


def toolkit(folder: Path, body: str, architecture: str = "90-real") -> Toolkit:
    """Create a toolkit whose nvcc runs ``body``."""
    nvcc = script(folder / "bin" / "nvcc", body)
    return Toolkit(nvcc, "13.0.88", {"CMAKE_CUDA_ARCHITECTURES": architecture})


def test_driver_versions_and_gpus_are_read_from_nvidia_smi(tmp_path: Path) -> None:
    """Version, CUDA and each GPU are read once; without nvidia-smi there is none."""
    script(tmp_path / "nvidia-smi", SMI)
    found = nvidia.driver({"PATH": str(tmp_path)})
    assert found == nvidia.Driver("580.159.03", "13.0", "NVIDIA H200")
    assert nvidia.driver({"PATH": str(tmp_path / "none")}) is None


def test_driver_of_an_older_cuda_major_version_is_refused(tmp_path: Path) -> None:
    """Another major version of CUDA is refused with both hints; a minor one is not."""
    made = toolkit(tmp_path, "")
    assert nvidia.mismatch(made, nvidia.Driver("1", "13.2", "")) == ""
    problem = nvidia.mismatch(made, nvidia.Driver("535.1", "12.2", ""))
    assert "update the driver" in problem
    assert "toolkit of CUDA 12" in problem


def test_nothing_is_compiled_for_a_driver_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver ends the build; a missing one, and a GPU of another machine, do not."""
    made = toolkit(tmp_path, "exit 0\n")
    old = SMI.replace("CUDA Version: 13", "CUDA Version: 12")
    script(tmp_path / "smi" / "nvidia-smi", old)
    monkeypatch.setattr(cuda, "find", lambda: made)
    monkeypatch.delenv(cuda.ARCHITECTURE, raising=False)
    wanted: Any = SimpleNamespace(
        backend=SimpleNamespace(name="cuda"), compiler=SimpleNamespace(cxx="g++")
    )
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    build.check_toolchain(wanted)
    monkeypatch.setenv("PATH", str(tmp_path / "smi"))
    with pytest.raises(ToolMissing, match=r"driver 580\.159\.03 is too old.*update the driver"):
        build.check_toolchain(wanted)
    monkeypatch.setenv(cuda.ARCHITECTURE, "90-real")
    build.check_toolchain(wanted)


def test_host_compiler_that_nvcc_refuses_is_named(tmp_path: Path) -> None:
    """The error has the compiler's message and a remedy."""
    nvidia.prove(toolkit(tmp_path / "good", "exit 0\n"), "g++")
    made = toolkit(
        tmp_path, "echo 'In file x'; echo '#error -- unsupported GNU version!'; exit 1\n"
    )
    with pytest.raises(ToolMissing, match=r"unsupported GNU version.*CC and CXX"):
        nvidia.prove(made, "g++-99")


def test_nvcc_trial_compiles_for_the_first_architecture(tmp_path: Path) -> None:
    """CMake's suffixes of architectures are not passed to nvcc."""
    body = f'echo "$*" >{tmp_path}/arguments\n'
    nvidia.prove(toolkit(tmp_path, body, "90a-real;86-virtual"), "g++")
    words = (tmp_path / "arguments").read_text(encoding="utf-8").split()
    assert "-arch=sm_90a" in words
    assert words[words.index("-ccbin") + 1] == "g++"


def test_architecture_unsupported_by_the_toolkit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with the supported ones."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    body = """case $* in
--list-gpu-arch) printf 'compute_75\\ncompute_90\\n' ;;
*) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
esac
"""
    script(tmp_path / "cuda" / "bin" / "nvcc", body)
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cublas_v2.h").touch()
    env = {"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}
    assert cuda.find({**env, cuda.ARCHITECTURE: "75;90-real"}).architecture == "75;90-real"
    with pytest.raises(UsageError, match=r"architecture 61, but for 75, 90"):
        cuda.find({**env, cuda.ARCHITECTURE: "61-real;90"})


@pytest.mark.slow
def test_the_doctor_names_the_missing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are: no nvcc, no driver, a driver that is too old, and no problem."""
    monkeypatch.setattr(cuda, "USUAL", tmp_path / "usual")
    monkeypatch.setattr(cuda, "_wheel_folders", list)
    env = {"PATH": str(tmp_path), cuda.ARCHITECTURE: "90-real"}
    assert "pip install 'nvidia-cuda-nvcc" in doctor.gpu(env).hint
    made = toolkit(tmp_path / "cuda", "exit 0\n")
    monkeypatch.setattr(cuda, "find", lambda _env: made)
    found = doctor.gpu(env)
    assert (found.state, "no driver" in found.found) == ("optional", True)
    script(tmp_path / "nvidia-smi", SMI)
    assert doctor.gpu(env).state == "ok"
    script(tmp_path / "nvidia-smi", SMI.replace("CUDA Version: 13", "CUDA Version: 11"))
    assert "update the driver" in doctor.gpu(env).hint
