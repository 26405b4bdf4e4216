"""Check an NVIDIA machine: whether the toolkit compiles, and the driver runs its code."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import cuda
from pyllamakv.errors import ToolMissing

if TYPE_CHECKING:
    from collections.abc import Mapping

_HINT = "name another compiler in CC and CXX, or install a toolkit that goes with it"


@dataclass(frozen=True)
class Driver:
    """The report of `nvidia-smi`: driver, newest supported CUDA version, and GPUs."""

    version: str
    cuda: str
    gpus: str


def driver(environ: Mapping[str, str] | None = None) -> Driver | None:
    """Return the NVIDIA driver of this machine, or None."""
    said = cuda.program_output("nvidia-smi", env=environ)
    match = re.search(r"Driver Version:\s*([\d.]+).*?CUDA Version:\s*([\d.]+)", said)
    if match is None:
        return None
    names = cuda.program_output(
        "nvidia-smi", "--query-gpu=name", "--format=csv,noheader", env=environ
    )
    gpus = ", ".join(dict.fromkeys(filter(None, map(str.strip, names.splitlines()))))
    return Driver(match[1], match[2], gpus)


def mismatch(toolkit: cuda.Toolkit, found: Driver) -> str:
    """Return the remedy if the driver cannot run code of the toolkit, else nothing.

    Within a major version of CUDA older drivers run newer code that has the GPU's own machine code.
    """
    theirs, ours = (int(text.split(".")[0]) for text in (found.cuda, toolkit.version))
    if theirs >= ours:
        return ""
    return (
        f"the driver runs CUDA {found.cuda} at most, the toolkit is {toolkit.version}: update the "
        f"driver, or build with a toolkit of CUDA {theirs}"
    )


def need_driver(toolkit: cuda.Toolkit) -> None:
    """Raise ToolMissing if code for this machine's GPU could not run on it.

    A machine without a driver, or with a given architecture, builds for other machines.
    """
    found = None if os.environ.get(cuda.ARCHITECTURE, "").strip() else driver(os.environ)
    if found and (lacks := mismatch(toolkit, found)):
        hint = f"{lacks}; to build for another machine name its GPU in {cuda.ARCHITECTURE}"
        raise ToolMissing(f"driver {found.version} is too old: {hint}", "driver", hint)


def prove(toolkit: cuda.Toolkit, cxx: str) -> None:
    """Compile one kernel with the host compiler; raise ToolMissing with the toolkit's own words.

    A toolkit refuses host compilers that are younger, or much older, than itself.
    """
    with tempfile.TemporaryDirectory(prefix="pyllamakv-nvcc-") as name:
        source = Path(name) / "probe.cu"
        source.write_text("__global__ void probe(int *p) { *p = 1; }\n", encoding="utf-8")
        number = re.match(r"\d+[af]?", toolkit.architecture)
        assert number is not None
        command = [str(toolkit.nvcc), "-ccbin", cxx, f"-arch=sm_{number[0]}", "-std=c++17"]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(source.with_suffix(".o"))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
        )
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        first = next((line for line in said if "error" in line.lower()), said[0] if said else "")
        raise ToolMissing(
            f"nvcc {toolkit.version} cannot compile for {toolkit.architecture} with {cxx} "
            f"({first}); {_HINT}",
            "nvcc",
            _HINT,
        )
