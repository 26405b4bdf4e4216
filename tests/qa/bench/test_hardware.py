"""What runs on a GPU machine runs here on an RPC server: build, scenarios, benchmarks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from building_kit import script
from typer.testing import CliRunner

from pyllamakv.errors import ContextError
from pyllamakv.verification import check
from qa import benchmarks as cli
from qa.bench import devices, hardware
from qa.bench.defrag_workloads import SETTINGS, CacheShape
from qa.bench.figure import Figure

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

ROOT = Path(__file__).resolve().parents[3]


def server_verdict(_release: str, **_more: object) -> SimpleNamespace:
    """Return what a check of both servers finds."""
    scenarios = {"server-parallel": "needed"}
    decision = SimpleNamespace(verdict="needed", reason="stock fails\nmore", scenarios=scenarios)
    return SimpleNamespace(decision=decision)


@pytest.mark.native
def test_all_steps_on_a_server(
    stock: Variant, patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools, both builds, the verdict and the figures are in one group, with the total time."""
    whole = check.check

    def some(question: check.CheckRequest, **more):
        few = dataclasses.replace(question, scenarios=("fragmented",), quick=True)
        return whole(few, **more)

    monkeypatch.setattr(hardware.check, "check", some)
    monkeypatch.setattr(devices, "RPC_PLAN", ((CacheShape("1B", SETTINGS[0], 256), "alternate"),))
    monkeypatch.setattr(hardware.server_check, "check_server", server_verdict)
    ticks: list[None] = []
    release = patched.manifest.release
    found = hardware.figures(lambda: ticks.append(None), "rpc", (release,))
    assert {figure.group for figure in found} == {f"On a device: rpc, {release}"}
    tools, first, second, moved, served, judged, time = found
    assert "loopback" in tools.value
    assert first.name.endswith("stock")
    assert second.name.endswith("patched")
    assert judged.met
    assert judged.value.startswith("needed: stock fails 2 of 2 runs")
    assert served.met
    assert served.value == "needed: stock fails"
    assert served.data["server-parallel"] == "needed"
    assert "interleaved rounds" in moved.how
    assert time.met is not None
    assert ticks


def test_what_fails_late_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is handed on as it ends, and a verdict or a benchmark that fails is a row."""

    def fail(*_words, **_more):
        raise ContextError("no room on the device\nmore")

    def build(spec, **_more):
        name = "full-defrag" if spec.startswith("0.3.9") else "compaction"
        return SimpleNamespace(manifest=SimpleNamespace(cpu_seconds=1.0, patches=(name,)))

    monkeypatch.setattr(hardware, "build", build)
    monkeypatch.setattr(hardware.check, "check", fail)
    monkeypatch.setattr(hardware.server_check, "check_server", fail)
    monkeypatch.setattr(hardware.devices, "on", fail)
    monkeypatch.setattr(hardware.devices, "sparse_on", fail)
    kept: list[list[str]] = []
    found = hardware.figures(
        lambda: None, "rpc", keep=lambda figures: kept.append([each.name for each in figures])
    )
    assert [len(each) for each in kept] == list(range(1, 15))
    assert kept[-1] == [each.name for each in found]
    for first in (0, 7):
        assert [each.value for each in found[first + 3 : first + 6]] == [
            "not measured: no room on the device",
            "no verdict: no room on the device",
            "no verdict: no room on the device",
        ]
        assert not any(each.met for each in found[first + 3 : first + 6])
    assert [each.group for each in found[::7]] == [
        f"On a device: rpc, {name}" for name in hardware.releases()
    ]


def test_a_release_before_servers_has_no_server_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of these releases can be built."""
    manifest = SimpleNamespace(cpu_seconds=1.0, patches=("full-defrag",))
    monkeypatch.setattr(hardware, "build", lambda *_, **__: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(hardware, "_judged", lambda *_: Figure("g", "scenarios", "needed"))
    monkeypatch.setattr(hardware.devices, "on", lambda *_, **__: [])
    found = hardware.figures(lambda: None, "rpc", ("0.3.5",))
    assert not [each for each in found if "server" in each.name]


def test_the_document_grows_with_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step that ends the command leaves what was measured before it."""

    def figures(_tick, backend, names, keep):
        keep([Figure(f"On a device: {backend}, {names[0]}", "tools", "there")])
        raise ContextError("no room on the device")

    monkeypatch.setattr(hardware, "figures", figures)
    target = tmp_path / "B.md"
    done = CliRunner().invoke(
        cli.app,
        ["hardware", "--backend", "rpc", "--release", "0.3.9", "--write", str(target)],
        catch_exceptions=True,
    )
    assert isinstance(done.exception, ContextError)
    assert "| tools | there |" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("there", [False, True])
def test_the_script_installs_a_toolkit(tmp_path: Path, there: bool) -> None:
    """Its wheels come along where there is no nvcc."""
    tools = tmp_path / "tools"
    text = (ROOT / "tools" / "cuda.sh").read_text(encoding="utf-8")
    script(tools / "cuda.sh", text.replace("/usr/local/cuda", str(tmp_path / "cuda")))
    script(tools / "bootstrap.sh", f'echo "$*" >{tmp_path}/asked; echo true\n')
    script(tmp_path / "bin" / "nvidia-smi", "exit 0\n")
    if there:
        script(tmp_path / "bin" / "nvcc", "exit 0\n")
    for name in ("dirname", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path / "bin")}
    subprocess.run([tools / "cuda.sh"], env=env, check=False, capture_output=True, timeout=120)
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert asked == ("own test\n" if there else "own test,cuda\n")


def test_the_script_wants_a_gpu(tmp_path: Path) -> None:
    """Without a device, the benchmark reports that and builds nothing."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    done = subprocess.run(
        [ROOT / "tools" / "cuda.sh"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
