"""Test the script for GPU machines on an RPC server: build, scenarios, benchmarks."""

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

from pyllamakv.errors import BuildError, ContextError, Unsupported, Untestable
from pyllamakv.verification import check
from qa import benchmarks as cli
from qa import summary
from qa.bench import devices, hardware
from qa.bench.defrag_workloads import SETTINGS, CacheShape
from qa.bench.figure import Figure

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.native
def test_hardware_benchmark_runs_every_step(
    stock: Variant, patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools, both builds, the verdict and the figures are in one group, with the total time."""
    whole = check.check

    def some(question: check.CheckRequest, **more):
        few = dataclasses.replace(question, scenarios=("fragmented",), quick=True)
        return whole(few, **more)

    monkeypatch.setattr(hardware.check, "check", some)
    monkeypatch.setattr(devices, "RPC_PLAN", ((CacheShape("1B", SETTINGS[0], 256), "alternate"),))
    ticks: list[None] = []
    release = patched.manifest.release
    found = hardware.figures(lambda: ticks.append(None), "rpc", (release,))
    assert {figure.group for figure in found} == {f"On a device: rpc, {release}"}
    tools, first, second, moved, judged, time = found
    assert "loopback" in tools.value
    assert first.name.endswith("stock")
    assert second.name.endswith("patched")
    assert judged.met
    assert judged.value.startswith("needed: stock fails 2 of 2 runs")
    assert "interleaved rounds" in moved.how
    assert time.met is not None
    assert ticks


def test_late_failure_keeps_completed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is stored when it ends, and a failed verdict or benchmark is a row."""

    def fail(*_words, **_more):
        raise ContextError("no room on the device\nmore")

    def build(spec, **_more):
        name = "full-defrag" if spec.startswith("0.3.9") else "compaction"
        return SimpleNamespace(manifest=SimpleNamespace(cpu_seconds=1.0, patches=(name,)))

    def sparse(*_words, **_more):
        raise ContextError("no room for a sparse cache")

    monkeypatch.setattr(hardware, "build", build)
    monkeypatch.setattr(hardware, "build_server", lambda *_, **__: None)
    monkeypatch.setattr(hardware, "_tools", lambda _backend: "a GPU")
    monkeypatch.setattr(hardware.check, "check", fail)
    monkeypatch.setattr(hardware.server_check, "check_server", fail)
    monkeypatch.setattr(hardware.devices, "on", fail)
    monkeypatch.setattr(hardware.devices, "sparse_on", sparse)
    kept: list[list[str]] = []
    found = hardware.figures(
        lambda: None, "metal", keep=lambda figures: kept.append([each.name for each in figures])
    )
    # Nothing is written before the builds are complete: it would replace an earlier measurement.
    assert [len(each) for each in kept] == [5, 6, 7, 8, 13, 14, 15, 16]
    assert kept[-1] == [each.name for each in found]
    for first, cause in ((0, "no room on the device"), (8, "no room for a sparse cache")):
        assert [each.value for each in found[first + 4 : first + 7]] == [
            f"not measured: {cause}",
            "no verdict: no room on the device",
            "no verdict: no room on the device",
        ]
        assert [each.met for each in found[first + 4 : first + 7]] == [False] * 3
    assert [each.group for each in found[::8]] == [
        f"On a device: metal, {name}" for name in hardware.releases()
    ]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build nothing, and measure only servers."""
    manifest = SimpleNamespace(cpu_seconds=1.0, patches=("full-defrag",))
    monkeypatch.setattr(hardware, "build", lambda *_, **__: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(hardware, "_tools", lambda _backend: "a GPU")
    decision = SimpleNamespace(verdict="needed", reason="stock fails", runs=1, scenarios={})
    found = SimpleNamespace(decision=decision)
    monkeypatch.setattr(hardware.check, "check", lambda *_, **__: found)
    monkeypatch.setattr(hardware.devices, "on", lambda *_, **__: [])


@pytest.mark.parametrize(
    ("verdict", "code", "met"), [("needed", 0, True), ("works", 0, True), ("harmful", 1, False)]
)
@pytest.mark.usefixtures("built")
def test_servers_run_on_the_device(
    monkeypatch: pytest.MonkeyPatch, verdict: str, code: int, met: bool
) -> None:
    """Both are built for it; the target of a verdict is that patched passes."""
    asked: list[tuple[str, str]] = []

    def build_server(spec: str, *, backend: str, **_more: object) -> None:
        asked.append((spec, backend))

    def check_server(release: str, *, backend: str, **_more: object) -> SimpleNamespace:
        asked.append((release, backend))
        facts = {"reason": "because\nmore", "runs": 9, "scenarios": {"server-parallel": verdict}}
        decision = SimpleNamespace(verdict=verdict, exit_code=code, **facts)
        return SimpleNamespace(decision=decision)

    monkeypatch.setattr(hardware, "build_server", build_server)
    monkeypatch.setattr(hardware.server_check, "check_server", check_server)
    found = hardware.figures(lambda: None, "metal", ("0.3.9",))
    assert asked == [("0.3.9+stock", "metal"), ("0.3.9+patched", "metal"), ("0.3.9", "metal")]
    (served,) = (each for each in found if each.name == "server scenarios on 0.3.9")
    assert served.met is met
    assert served.value == f"{verdict}: because"
    assert served.data["server-parallel"] == verdict


@pytest.mark.parametrize(
    ("backend", "error", "rows"),
    [
        ("rpc", None, []),
        ("metal", Unsupported("no server in these sources", "server"), []),
        ("metal", BuildError("no compiler\nmore"), ["failed: no compiler"]),
    ],
)
@pytest.mark.usefixtures("built")
def test_servers_that_cannot_run_there_have_no_verdict(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: Exception | None, rows: list[str]
) -> None:
    """With RPC they would compute on the CPU; a failed build is a row."""

    def build_server(*_words: object, **_more: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(hardware, "build_server", build_server)
    found = hardware.figures(lambda: None, backend, ("0.3.5",))
    assert [each.value for each in found if "server" in each.name] == rows


def test_an_unknown_bandwidth_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defragmentations are measured without it."""

    def fail(_toolkit: object) -> None:
        raise Untestable("no libcudart")

    monkeypatch.setattr(hardware.cuda, "find", lambda: None)
    monkeypatch.setattr(hardware.cuda_bandwidth, "measure", fail)
    rate, (row,) = hardware._bandwidth("cuda", "group")
    assert rate == 0
    assert row.value == "not measured: no libcudart"
    assert hardware._bandwidth("rpc", "group") == (0.0, [])


def test_results_are_stored_after_each_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a step ends the command, the results of earlier steps are kept."""

    def figures(_tick, backend, names, keep):
        keep([Figure(f"On a device: {backend}, {names[0]}", "tools", "1 x", "2 x", met=False)])
        raise ContextError("no room on the device")

    monkeypatch.setattr(hardware, "figures", figures)
    target = tmp_path / "B.json"
    done = CliRunner().invoke(
        cli.app,
        ["hardware", "--backend", "rpc", "--release", "0.3.9", "--write", str(target)],
        catch_exceptions=True,
    )
    assert isinstance(done.exception, ContextError)
    assert [each.name for each in summary.read(target, Figure)] == ["tools"]


@pytest.mark.parametrize("there", [False, True])
def test_the_script_installs_a_toolkit(tmp_path: Path, there: bool) -> None:
    """Without nvcc, the wheels of the toolkit are installed."""
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


def test_benchmark_script_without_a_gpu_builds_nothing(tmp_path: Path) -> None:
    """Without a device, the benchmark reports that and builds nothing."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    done = subprocess.run(
        [ROOT / "tools" / "cuda.sh"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
