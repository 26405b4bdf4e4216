"""Build for a device, judge a release on it, and measure defragmentations there, in ten minutes.

What was built, with which driver and toolkit, and what the scenarios said stands beside the
figures: they mean nothing without.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyllamakv.bench import devices
from pyllamakv.bench.figure import Figure
from pyllamakv.building import cuda, nvidia, probing
from pyllamakv.building.build import build
from pyllamakv.harness import check
from pyllamakv.source.releases import DEFAULT

Tick = Callable[[], None]

#: Seconds for everything.
LIMIT = 600.0


def figures(
    tick: Tick, backend: str = "cuda", release: str = DEFAULT, limit: float = LIMIT
) -> list[Figure]:
    """Return the figures of a backend on this machine; raises what building raises.

    The benchmarks take what is left of the time, and are shortened to it.
    """
    group = f"On a device: {backend}"
    started = time.monotonic()
    found = [Figure(group, "device, driver and toolkit", _tools(backend))]
    for side in ("stock", "patched"):
        before = time.monotonic()
        made = build(f"{release}+{side}", backend=backend, progress=lambda *_: tick()).manifest
        wall = time.monotonic() - before
        value = f"{wall:.0f} s, {made.cpu_seconds:.0f} s of CPU when it was compiled"
        found.append(Figure(group, f"build of {release}, {side}", value, data={"wall": wall}))
    before = time.monotonic()
    question = check.Question(release, backend=backend, fresh=True)
    answer = check.check(question, progress=lambda *_: tick())
    judged = answer.judgement
    wall = time.monotonic() - before
    found.append(
        Figure(
            group,
            f"all scenarios on {release}",
            f"{judged.verdict}: {judged.reason.splitlines()[0]}",
            "needed",
            str(judged.verdict) == "needed",
            "",
            f"{judged.runs} runs a side in {wall:.0f} s",
            {"wall": wall, **{str(name): str(each) for name, each in judged.scenarios.items()}},
        )
    )
    left = limit - (time.monotonic() - started)
    found += [
        Figure(**{**vars(each), "group": group})
        for each in devices.on(tick, backend, release, budget=max(60.0, left))
    ]
    whole = time.monotonic() - started
    found.append(
        Figure(group, "all of this", f"{whole:.0f} s", f"<= {limit:.0f} s", whole <= limit)
    )
    return found


def _tools(backend: str) -> str:
    if backend == "cuda":
        toolkit, driver = cuda.find(), nvidia.driver()
        seen = f"{driver.gpus}, driver {driver.version}" if driver else "no driver"
        return f"{seen}; nvcc {toolkit.version} for {toolkit.architecture}"
    if backend == "vulkan":
        return ", ".join(probing.vulkan_devices()) or "a Vulkan driver that does not tell its name"
    return "this machine's processor, behind RPC on loopback" if backend == "rpc" else backend
