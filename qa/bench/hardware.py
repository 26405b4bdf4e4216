"""Build for a device, verify a release on it, and measure defragmentations there, in ten minutes.

Driver, toolkit, build and scenario results are part of the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyllamakv.building import cuda, doctor, nvidia
from pyllamakv.building.build import build
from pyllamakv.errors import KvError
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.verification import check
from qa.bench import devices
from qa.bench.figure import Figure

Tick = Callable[[], None]
#: Receives all figures so far.
Keep = Callable[[list[Figure]], None]

#: Total time in seconds.
LIMIT = 600.0


def figures(
    tick: Tick,
    backend: str = "cuda",
    release: str = TEST_RELEASE,
    limit: float = LIMIT,
    keep: Keep | None = None,
) -> list[Figure]:
    """Return the figures of a backend on this machine. Raises the exceptions of a build.

    ``keep`` receives the figures after each step, so that a failure of a later step loses nothing.
    Failures after the build are rows. The benchmarks use the remaining time.
    """
    group = f"On a device: {backend}"
    started = time.monotonic()
    found: list[Figure] = []

    def add(*more: Figure) -> None:
        found.extend(more)
        if keep is not None:
            keep(found)

    add(Figure(group, "device, driver and toolkit", _tools(backend)))
    for side in ("stock", "patched"):
        before = time.monotonic()
        made = build(f"{release}+{side}", backend=backend, progress=lambda *_: tick()).manifest
        wall = time.monotonic() - before
        value = f"{wall:.0f} s, {made.cpu_seconds:.0f} s of CPU when it was compiled"
        add(Figure(group, f"build of {release}, {side}", value, data={"wall": wall}))
    add(_judged(tick, backend, release, group))
    left = limit - (time.monotonic() - started)
    try:
        measured = devices.on(tick, backend, release, budget=left)
    except KvError as error:
        measured = [Figure(group, "defragmentations", f"not measured: {_first(error)}", met=False)]
    add(*(Figure(**{**vars(each), "group": group}) for each in measured))
    whole = time.monotonic() - started
    add(Figure(group, "all of this", f"{whole:.0f} s", f"<= {limit:.0f} s", whole <= limit))
    return found


def _judged(tick: Tick, backend: str, release: str, group: str) -> Figure:
    before, name = time.monotonic(), f"all scenarios on {release}"
    question = check.CheckRequest(release, backend=backend, fresh=True)
    try:
        judged = check.check(question, progress=lambda *_: tick()).decision
    except KvError as error:
        return Figure(group, name, f"no verdict: {_first(error)}", "needed", met=False)
    wall = time.monotonic() - before
    return Figure(
        group,
        name,
        f"{judged.verdict}: {judged.reason.splitlines()[0]}",
        "needed",
        str(judged.verdict) == "needed",
        "",
        f"{judged.runs} runs a side in {wall:.0f} s",
        {"wall": wall, **{str(name): str(each) for name, each in judged.scenarios.items()}},
    )


def _first(error: KvError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tools(backend: str) -> str:
    if backend == "cuda":
        toolkit, driver = cuda.find(), nvidia.driver()
        seen = f"{driver.gpus}, driver {driver.version}" if driver else "no driver"
        return f"{seen}; nvcc {toolkit.version} for {toolkit.architecture}"
    if backend == "vulkan":
        return ", ".join(doctor.vulkan_devices()) or "a Vulkan driver that does not tell its name"
    return "this machine's processor, behind RPC on loopback" if backend == "rpc" else backend
