"""Build for a device, verify releases and their servers on it, and measure caches there.

Driver, toolkit, builds and results of scenarios are part of the figures. A release that moves cells
before a batch is measured by complete defragmentations, and a later one by a sparse cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pyllamakv.building import cuda, doctor, nvidia
from pyllamakv.building.build import build
from pyllamakv.errors import KvError, Unsupported
from pyllamakv.server import server_check
from pyllamakv.server.server_build import build_server
from pyllamakv.source import verified
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.verification import check
from pyllamakv.verification.verdict import Decision
from qa.bench import cuda_bandwidth, devices
from qa.bench.figure import Figure

Tick = Callable[[], None]
#: Receives all figures so far.
Keep = Callable[[list[Figure]], None]

#: The target of a verdict that is not "needed" on every release.
PASSES = "patched passes"

#: Target for the time of a release without its builds, and limit of its benchmarks, in seconds.
TARGET = 300.0
BENCHMARKS = 120.0


def releases() -> tuple[str, ...]:
    """Return the releases that are measured by default: the test release and the newest one."""
    return tuple(dict.fromkeys((TEST_RELEASE, verified.newest().name)))


def figures(
    tick: Tick,
    backend: str = "cuda",
    names: Sequence[str] = (),
    keep: Keep | None = None,
) -> list[Figure]:
    """Return the figures of a backend on this machine. Raises the exceptions of a build.

    ``names`` are releases (default: `releases`). ``keep`` receives the figures after each step that
    follows the builds of a release, so that a failure of a later step loses nothing. Failures after
    the builds are rows. The scenarios run in few settings: all settings of 0.3.9 took 280 s on an
    H100 with 16 cores.
    """
    found: list[Figure] = []

    def add(*more: Figure) -> None:
        found.extend(more)
        if keep is not None:
            keep(found)

    for name in names or releases():
        _measure(tick, backend, name, found, add)
    return found


def _measure(
    tick: Tick, backend: str, release: str, found: list[Figure], add: Callable[..., None]
) -> None:
    group = f"On a device: {backend}, {release}"

    def scenarios() -> Decision:
        question = check.CheckRequest(release, backend=backend, fresh=True, quick=True)
        return check.check(question, progress=lambda *_: tick()).decision

    def servers() -> Decision:
        return server_check.check_server(
            release, backend=backend, progress=lambda *_: tick()
        ).decision

    found.append(Figure(group, "device, driver and toolkit", _tools(backend)))
    patches: tuple[str, ...] = ()
    for side in ("stock", "patched"):
        before = time.monotonic()
        made = build(f"{release}+{side}", backend=backend, progress=lambda *_: tick()).manifest
        patches = tuple(made.patches)
        wall = time.monotonic() - before
        value = f"{wall:.0f} s, {made.cpu_seconds:.0f} s of CPU when it was compiled"
        found.append(Figure(group, f"build of {release}, {side}", value, data={"wall": wall}))
    served = _build_servers(tick, backend, release, group)
    found += served
    started = time.monotonic()
    if "full-defrag" in patches:
        rate, unknown = _bandwidth(backend, group)
        measured = _attempt(
            lambda: devices.on(tick, backend, release, budget=BENCHMARKS, bandwidth=rate)
        )
        measured = [*unknown, *measured]
    else:
        measured = _attempt(lambda: [devices.sparse_on(tick, backend, release)])
    add(*(Figure(**{**vars(each), "group": group}) for each in measured))
    if any(each.met is None for each in served):
        add(_verdict(group, f"server scenarios on {release}", PASSES, servers))
    add(_verdict(group, f"scenarios on {release}, few settings", "needed", scenarios))
    whole = time.monotonic() - started
    name = "benchmarks and scenarios"
    add(Figure(group, name, f"{whole:.0f} s", f"<= {TARGET:.0f} s", whole <= TARGET))


def _attempt(measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Return figures, or a row with the reason why there are none."""
    try:
        return measure()
    except KvError as error:
        return [Figure("", "benchmarks", f"not measured: {_first(error)}", met=False)]


def _bandwidth(backend: str, group: str) -> tuple[float, list[Figure]]:
    """Return the speed of a GPU's own copies (0: unknown), and a row if it cannot be measured."""
    if backend != "cuda":
        return 0.0, []
    try:
        return cuda_bandwidth.measure(cuda.find()), []
    except KvError as error:
        return 0.0, [Figure(group, "copies of the GPU", f"not measured: {_first(error)}")]


def _build_servers(tick: Tick, backend: str, release: str, group: str) -> list[Figure]:
    """Build both servers; return a row. On RPC there is none, because they would use the CPU."""
    if backend == "rpc":
        return []
    name, before = f"build of the servers of {release}", time.monotonic()
    try:
        for side in ("stock", "patched"):
            build_server(f"{release}+{side}", backend=backend, progress=lambda *_: tick())
    except Unsupported:
        return []
    except KvError as error:
        return [Figure(group, name, f"failed: {_first(error)}", met=False)]
    return [Figure(group, name, f"{time.monotonic() - before:.0f} s")]


def _verdict(group: str, name: str, target: str, decide: Callable[[], Decision]) -> Figure:
    """Return a row with a verdict, or with the reason why there is none."""
    before = time.monotonic()
    try:
        found = decide()
    except KvError as error:
        return Figure(group, name, f"no verdict: {_first(error)}", target, met=False)
    wall = time.monotonic() - before
    return Figure(
        group,
        name,
        f"{found.verdict}: {found.reason.splitlines()[0]}",
        target,
        found.exit_code == 0 if target == PASSES else str(found.verdict) == target,
        "",
        f"{found.runs} runs a side in {wall:.0f} s",
        {"wall": wall, **{str(name): str(each) for name, each in found.scenarios.items()}},
    )


def _first(error: KvError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tools(backend: str) -> str:
    if backend == "cuda":
        toolkit, driver = cuda.find(), nvidia.driver()
        seen = f"{driver.gpus}, driver {driver.version}" if driver else "no driver"
        return f"{seen}; nvcc {toolkit.version} for {toolkit.architecture}"
    if backend == "vulkan":
        return ", ".join(doctor.vulkan_devices()) or "a Vulkan driver without a name"
    return "this machine's processor, behind RPC on loopback" if backend == "rpc" else backend
