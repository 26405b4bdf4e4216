"""Measure complete defragmentations on device buffers: RPC on loopback, CUDA where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pyllamakv
from pyllamakv.bench import workloads
from pyllamakv.bench.carving import Carver
from pyllamakv.bench.figure import Figure
from pyllamakv.bench.measure import interval
from pyllamakv.bench.rounds import complete
from pyllamakv.bench.stands import context, model
from pyllamakv.bench.workloads import SETTINGS, Cache
from pyllamakv.errors import KvError, Untestable
from pyllamakv.harness.placing import ALL, Place
from pyllamakv.runtime.params import Mover
from pyllamakv.source.releases import DEFAULT

GROUP = "Devices"
Tick = Callable[[], None]

#: What the patch chooses, what the published algorithm does, and the way by the host.
MOVERS: tuple[Mover, ...] = ("auto", "graph", "staged")

#: Small, for the published algorithm takes minutes over a network.
RPC_PLAN = tuple(
    (Cache("1B", setting, 4096), pattern)
    for setting in SETTINGS[:2]
    for pattern in ("alternate", "runs of 16")
)
CUDA_PLAN = tuple(
    (Cache("8B", setting, cells), "alternate")
    for cells in (16384, 65536, 131072)
    for setting in SETTINGS[:2]
)


def figures(tick: Tick, release: str = DEFAULT, rounds: int = 15) -> list[Figure]:
    """Measure on a server on loopback, and on an NVIDIA GPU where a CUDA variant is built."""
    return on(tick, "rpc", release, rounds) + cuda(tick, release, rounds)


def cuda(tick: Tick, release: str, rounds: int) -> list[Figure]:
    """Measure on the GPU, or say why not."""
    try:
        return on(tick, "cuda", release, rounds)
    except KvError as error:
        reason, _, _ = str(error).partition(";")
        return [
            Figure(
                GROUP,
                f"CUDA, {_what(cache, pattern)}",
                f"not yet measured: {reason}",
                ">= 10 x the published algorithm, >= 50 % of the bandwidth with V in rows",
            )
            for cache, pattern in CUDA_PLAN
        ]


def on(
    tick: Tick,
    backend: str,
    release: str = DEFAULT,
    rounds: int = 15,
    budget: float | None = None,
) -> list[Figure]:
    """Measure on a backend's device, in ``budget`` seconds at the cost of rounds."""
    plan = CUDA_PLAN if backend == "cuda" else RPC_PLAN
    spec = f"{release}+patched"
    share = None if budget is None else budget / len(plan)
    with ExitStack() as opened:
        endpoint = opened.enter_context(pyllamakv.serve(spec)).endpoint if backend == "rpc" else ""
        env = Place(backend).environment
        library = opened.enter_context(
            pyllamakv.open(spec, isolated=True, env=env, backend=backend)
        )
        stand = Stand(backend.upper(), library, rounds, tick, share, endpoint or None)
        return [_measure(stand, cache, pattern) for cache, pattern in plan]


@dataclass(frozen=True)
class Stand:
    """Hold where is measured, and how much."""

    device: str
    library: pyllamakv.OpenLibrary
    rounds: int
    tick: Tick
    budget: float | None = None
    endpoint: str | None = None


def _measure(stand: Stand, cache: Cache, pattern: str) -> Figure:
    mask = workloads.live(pattern, cache.cells)
    seconds: dict[str, list[float]] = {each: [] for each in MOVERS}
    graphs = scratch = 0
    path = model(cache.shape)
    with (
        stand.library.load_model(path, n_gpu_layers=ALL, rpc_servers=stand.endpoint) as loaded,
        ExitStack() as opened,
    ):
        stands = {}
        for mover in MOVERS:
            made = opened.enter_context(context(loaded, cache, defrag_mover=mover))
            if made.kv.snapshot().streams[0].info.host > 0:
                msg = f"the cache lies in host memory, not on the {stand.device} device"
                raise Untestable(msg)
            stands[mover] = (made, Carver(made))
        until = time.monotonic() + (stand.budget or float("inf"))
        for number in range(stand.rounds + 1):
            if number > 1 and time.monotonic() > until:
                break
            for mover, (made, carver) in stands.items():
                carver.carve(mask)
                report = complete(made, mask)
                # The first pays for what is needed once.
                if number:
                    seconds[mover].append(report.seconds)
                if mover == "auto":
                    graphs, scratch = report.graphs or 0, report.scratch or 0
                stand.tick()
    ours = interval(seconds["auto"])
    published, staged = (
        interval([a / b for a, b in zip(seconds[each], seconds["auto"], strict=True)])
        for each in MOVERS[1:]
    )
    return Figure(
        GROUP,
        f"{stand.device}, {_what(cache, pattern)}",
        f"{ours.median * 1e3:.0f} ms in {graphs} graphs; the published algorithm takes "
        f"{published.format(1)} times, the way by the host {staged.format(1)} times as long",
        "never slower than the published algorithm",
        published.high >= 1.0,
        f"scratch: {scratch / 1e6:.1f} MB",
        f"{len(seconds['auto'])} interleaved rounds",
        dict(seconds),
    )


def _what(cache: Cache, pattern: str) -> str:
    return f"{cache.shape}, {cache.cells} cells, {pattern}, {cache.setting.name}"
