"""Test the doctor: present and missing programs, hints, required and optional ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from building_kit import script
from typer.testing import CliRunner

from pyllamakv.building import cmake, doctor
from pyllamakv.cli import doctor as verb
from pyllamakv.errors import ToolMissing

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.doctor import ProbeResult


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide every program of this machine and return the directory that replaces PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    for name in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "PYLLAMAKV_COMPILER_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return folder


def by_name(findings: list[ProbeResult]) -> dict[str, ProbeResult]:
    """Return the findings by name."""
    return {finding.name: finding for finding in findings}


def test_doctor_reports_required_and_optional_programs_as_missing(bare: Path) -> None:
    """Without programs, required ones are missing, the others optional; all have a hint."""
    found = by_name(doctor.examine())
    assert found["compiler"].state == found["git"].state == "missing"
    assert "g++" in found["compiler"].hint
    for name in ("make", "prebuilt", "npm", "ccache"):
        assert found[name].state == "optional"
        assert found[name].hint
    assert found["python"].state == found["cmake"].state == found["ninja"].state == "ok"
    assert not doctor.healthy(list(found.values()))


def test_doctor_reports_installed_programs_as_ok(bare: Path) -> None:
    """With compiler and git, no required program is missing."""
    version = (
        "case $1 in --version) echo 'gcc (X) 1.2' ;; -dumpmachine) echo x86_64-x ;; "
        "-std=*) echo '#define __cplusplus 201703L' ;; esac\n"
    )
    for name in ("gcc", "g++", "git", "make", "npm", "ccache"):
        script(bare / name, version)
    found = by_name(doctor.examine())
    for name in ("compiler", "git", "make", "npm", "ccache"):
        assert found[name].state == "ok", name


def test_every_doctor_finding_other_than_ok_has_a_hint(bare: Path) -> None:
    """Every finding other than ok has a hint."""
    assert all(f.hint for f in doctor.examine() if f.state != "ok" and f.name != "platform")


def test_doctor_reports_a_full_disk_and_little_memory(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk and little memory are reported."""

    class Usage:
        free = 1 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _place: Usage)
    monkeypatch.setattr(doctor.build, "available_memory", lambda: 1 << 20)
    found = by_name(doctor.examine())
    assert found["disk"].state == "missing"
    assert "PYLLAMAKV_HOME" in found["disk"].hint
    assert found["memory"].state == "optional"


def test_doctor_reports_a_missing_wheel(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wheel is required."""

    def absent(name: str) -> Path:
        raise ToolMissing(f"no {name}: pip install cmake ninja", name)

    monkeypatch.setattr(cmake, "binary", absent)
    found = by_name(doctor.examine())
    assert found["cmake"].state == "missing"
    assert "pip install" in found["cmake"].hint


def test_doctor_command_exits_with_1_if_a_program_is_missing(bare: Path) -> None:
    """The verb prints a line per finding, or JSON, and exits with 1 if a program is missing."""
    text = CliRunner().invoke(verb.app, [])
    assert text.exit_code == 1
    assert "MISSING compiler" in text.stdout
    assert "fix: " in text.stdout
    listed = CliRunner().invoke(verb.app, ["--json"])
    assert {row["name"] for row in json.loads(listed.stdout)} >= {"compiler", "git", "disk"}
