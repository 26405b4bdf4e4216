"""Build for a device, verify releases and their servers on it, and measure caches there.

Driver, toolkit, builds and results of scenarios are part of the figures. A release that moves cells
before a batch is measured by complete defragmentations, and a later one by a sparse cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pyllamakv.building import cuda, doctor, nvidia
from pyllamakv.building.build import build
from pyllamakv.errors import KvError
from pyllamakv.server import server_check
from pyllamakv.source import lockfile, verified
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.verification import check
from qa import servers
from qa.bench import cuda_bandwidth, devices
from qa.bench.figure import Figure

Tick = Callable[[], None]
#: Receives all figures so far.
Keep = Callable[[list[Figure]], None]

#: Total time of a release in seconds, and that of its benchmarks.
LIMIT = 300.0
BENCHMARKS = 120.0


def releases() -> tuple[str, ...]:
    """Return the releases that are measured by default: the test release and the newest one."""
    return tuple(dict.fromkeys((TEST_RELEASE, verified.newest().name)))


def figures(
    tick: Tick,
    backend: str = "cuda",
    names: Sequence[str] = (),
    limit: float = LIMIT,
    keep: Keep | None = None,
) -> list[Figure]:
    """Return the figures of a backend on this machine. Raises the exceptions of a build.

    ``names`` are releases (default: `releases`), and ``limit`` is the time of one. ``keep``
    receives the figures after each step, so that a failure of a later step loses nothing. Failures
    after the build are rows. The scenarios run in few settings: on an H100 with 16 cores, all
    settings of 0.3.9 took 280 s.
    """
    found: list[Figure] = []

    def add(*more: Figure) -> None:
        found.extend(more)
        if keep is not None:
            keep(found)

    for name in names or releases():
        _measure(tick, backend, name, limit, add)
    return found


def _measure(
    tick: Tick, backend: str, release: str, limit: float, add: Callable[..., None]
) -> None:
    group = f"On a device: {backend}, {release}"
    started = time.monotonic()
    add(Figure(group, "device, driver and toolkit", _tools(backend)))
    patches: tuple[str, ...] = ()
    for side in ("stock", "patched"):
        before = time.monotonic()
        made = build(f"{release}+{side}", backend=backend, progress=lambda *_: tick()).manifest
        patches = tuple(made.patches)
        wall = time.monotonic() - before
        value = f"{wall:.0f} s, {made.cpu_seconds:.0f} s of CPU when it was compiled"
        add(Figure(group, f"build of {release}, {side}", value, data={"wall": wall}))
    try:
        if "full-defrag" in patches:
            rate = cuda_bandwidth.measure(cuda.find()) if backend == "cuda" else 0.0
            measured = devices.on(tick, backend, release, budget=BENCHMARKS, bandwidth=rate)
        else:
            measured = [devices.sparse_on(tick, backend, release)]
    except KvError as error:
        measured = [Figure(group, "benchmarks", f"not measured: {_first(error)}", met=False)]
    add(*(Figure(**{**vars(each), "group": group}) for each in measured))
    if _has_server(release):
        add(_judged_server(tick, backend, release, group))
    add(_judged(tick, backend, release, group))
    whole = time.monotonic() - started
    add(Figure(group, "all of this", f"{whole:.0f} s", f"<= {limit:.0f} s", whole <= limit))


def _judged(tick: Tick, backend: str, release: str, group: str) -> Figure:
    before, name = time.monotonic(), f"scenarios on {release}, few settings"
    question = check.CheckRequest(release, backend=backend, fresh=True, quick=True)
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


def _has_server(release: str) -> bool:
    known = lockfile.known()
    return release not in known or known[release].order >= known[servers.FIRST].order


def _judged_server(tick: Tick, backend: str, release: str, group: str) -> Figure:
    before, name = time.monotonic(), f"server scenarios on {release}"
    try:
        judged = server_check.check_server(
            release, backend=backend, progress=lambda *_: tick()
        ).decision
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
        f"both servers built and run in {wall:.0f} s",
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
