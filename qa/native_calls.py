"""Make native calls at the boundaries of their arguments on every kind of memory.

The calls are those of ``tests/kits/memory_sweep_kit.py``, which runs each in a process of its own
and bypasses the checks of the Python API. All contexts are created; of the other calls, a part that
grows with the time of the run is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyllamakv.building import variant
from pyllamakv.source import lockfile
from pyllamakv.source.releases import TEST_RELEASE
from qa.entry import Entry, StressOptions, Tick, skipped_entry

ROOT = Path(__file__).resolve().parents[1]
#: Of so many calls, a run of 60 s makes one, beside those that create contexts.
PARTS = 2000


def names() -> tuple[str, ...]:
    """Return the names of all releases, stock and patched."""
    return tuple(f"{name}+{kind}" for name in lockfile.known() for kind in ("stock", "patched"))


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Make calls on each variant that is built; return an entry for each."""
    wanted = effort.only or (f"{TEST_RELEASE}+stock", f"{TEST_RELEASE}+patched")
    parts = max(1, round(PARTS * 60 / max(effort.seconds, 1)))
    return [make_calls(name, parts, effort.seed, tick) for name in wanted]


def make_calls(name: str, parts: int, seed: int, tick: Tick) -> Entry:
    """Make one in ``parts`` of all calls on a variant; each process that ends is a defect."""
    if variant.find(name) is None:
        return skipped_entry("native_calls", name, f"it is not built: pyllamakv build {name}")
    tick(f"{name}: calls on every kind of memory")
    kits = ROOT / "tests" / "kits"
    path = os.pathsep.join((str(kits), str(ROOT), os.environ.get("PYTHONPATH", "")))
    words = (str(kits / "memory_sweep_kit.py"), name, str(seed % parts), str(parts))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=folder, check=False,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    lines = ran.stdout.splitlines()
    defects = [line[2:] for line in lines if line.startswith("!")]
    if ran.returncode or not lines or not lines[-1].startswith("= "):
        return Entry("native_calls", name, {}, (*defects, f"the calls ended: {ran.stderr[-300:]}"))
    numbers = json.loads(lines[-1][2:])
    row = {column: f"{numbers[column]:,}" for column in ("memories", "calls", "refused")}
    row |= {"assertions": str(numbers["assertions"]), "signals": str(numbers["signals"])}
    row["seconds"] = f"{time.monotonic() - began:.0f}"
    return Entry("native_calls", name, row, tuple(defects), seed=seed, data=numbers)
