"""Each backend reports what is present, and how to install what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from building_kit import script

from pyllamakv.building import backend, doctor


def test_doctor_reports_rpc_and_cpu_as_available() -> None:
    """Both are part of every CPU build."""
    assert doctor.rpc().state == "ok"
    assert doctor.cpu().name == "cpu"


def test_metal_is_unavailable_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal is unavailable on other systems; on macOS it is reported as untested."""
    monkeypatch.setattr(sys, "platform", "linux")
    assert "on a Mac" in doctor.metal().hint
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: None)
    assert doctor.metal().hint == "xcode-select --install"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "never run" in doctor.metal().hint


def test_vulkan_needs_headers_loader_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each requirement has its own hint, and devices are listed."""
    monkeypatch.setattr(doctor, "_DRIVERS", (str(tmp_path),))
    env = {"PATH": str(tmp_path)}
    monkeypatch.setattr(backend, "vulkan_missing", lambda _env, **_more: "glslc")
    assert "libvulkan-dev" in doctor.vulkan(env).hint
    lacks = {False: "", True: ""}
    monkeypatch.setattr(backend, "vulkan_missing", lambda _env, spirv=False: lacks[spirv])
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _name: None)
    assert "libvulkan1" in doctor.vulkan(env).hint
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(sys, "platform", "linux")
    assert "mesa-vulkan-drivers" in doctor.vulkan(env).hint
    (tmp_path / "lvp_icd.json").touch()
    assert doctor.vulkan(env).state == "ok"
    script(tmp_path / "vulkaninfo", "printf '\\tdeviceName = llvmpipe (LLVM)\\n'\n")
    assert doctor.vulkan(env).found.endswith("llvmpipe (LLVM)")
    lacks[True] = "SPIRV-Headers"
    assert "spirv-headers" in doctor.vulkan(env).hint
