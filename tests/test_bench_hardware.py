"""What runs on a GPU machine runs here on an RPC server: build, scenarios, benchmarks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyllamakv.bench import devices, hardware
from pyllamakv.bench.workloads import SETTINGS, Cache
from pyllamakv.harness import check

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.native
def test_all_steps_on_a_server(
    stock: Variant, patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools, both builds, the verdict and the figures stand in one group, with the whole time."""
    whole = check.check

    def some(question: check.Question, **more):
        few = dataclasses.replace(question, scenarios=("fragmented",), quick=True)
        return whole(few, **more)

    monkeypatch.setattr(hardware.check, "check", some)
    monkeypatch.setattr(devices, "RPC_PLAN", ((Cache("1B", SETTINGS[0], 256), "alternate"),))
    ticks: list[None] = []
    found = hardware.figures(lambda: ticks.append(None), "rpc", patched.manifest.release, 1.0)
    assert {figure.group for figure in found} == {"On a device: rpc"}
    tools, first, second, judged, moved, time = found
    assert "loopback" in tools.value
    assert first.name.endswith("stock")
    assert second.name.endswith("patched")
    assert judged.met
    assert judged.value.startswith("needed: stock fails 2 of 2 runs")
    assert "interleaved rounds" in moved.how
    assert time.met is not None
    assert ticks


def test_the_script_wants_a_gpu(tmp_path: Path) -> None:
    """Without one it says so and builds nothing."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    done = subprocess.run(
        [ROOT / "tools" / "cuda.sh"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
