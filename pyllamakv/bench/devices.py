"""Measure complete defragmentations on device buffers: RPC on loopback, CUDA where there is one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pyllamakv
from pyllamakv.bench import workloads
from pyllamakv.bench.carving import Carver
from pyllamakv.bench.figure import Figure
from pyllamakv.bench.measure import interval
from pyllamakv.bench.rounds import complete
from pyllamakv.bench.stands import context, model
from pyllamakv.bench.workloads import SETTINGS, Cache
from pyllamakv.errors import KvError, Untestable
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

SERVE = "import sys, pyllamakv; pyllamakv.open(sys.argv[1]).native.rpc_serve(sys.argv[2], None, 0)"


def figures(tick: Tick, release: str = DEFAULT, rounds: int = 15) -> list[Figure]:
    """Measure on a server on loopback, and on an NVIDIA GPU where a CUDA variant is built."""
    spec = f"{release}+patched"
    found = []
    with serving(spec) as endpoint, pyllamakv.open(spec, isolated=True) as library:
        for cache, pattern in RPC_PLAN:
            found.append(_measure("RPC", library, cache, pattern, rounds, tick, endpoint))
    return found + cuda(tick, release, rounds)


def cuda(tick: Tick, release: str, rounds: int) -> list[Figure]:
    """Measure on the GPU, or say why not."""
    try:
        with pyllamakv.open(f"{release}+patched", isolated=True, backend="cuda") as library:
            return [
                _measure("CUDA", library, cache, pattern, rounds, tick)
                for cache, pattern in CUDA_PLAN
            ]
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


@contextmanager
def serving(spec: str, patience: float = 30.0) -> Iterator[str]:
    """Serve the processor of this machine to others on it; yield where."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    command = [sys.executable, "-c", SERVE, spec, endpoint]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as server:
        try:
            until = time.monotonic() + patience
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > until:
                    msg = f"the RPC server of {spec} does not answer at {endpoint}"
                    raise Untestable(msg)
                time.sleep(0.1)
            yield endpoint
        finally:
            server.kill()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _measure(
    device: str,
    library: pyllamakv.OpenLibrary,
    cache: Cache,
    pattern: str,
    rounds: int,
    tick: Tick,
    endpoint: str | None = None,
) -> Figure:
    mask = workloads.live(pattern, cache.cells)
    seconds: dict[str, list[float]] = {each: [] for each in MOVERS}
    graphs = scratch = 0
    path = model(cache.shape)
    with (
        library.load_model(path, n_gpu_layers=999, rpc_servers=endpoint) as loaded,
        ExitStack() as opened,
    ):
        stands = {}
        for mover in MOVERS:
            made = opened.enter_context(context(loaded, cache, defrag_mover=mover))
            if made.kv.snapshot().streams[0].info.host:
                msg = f"the cache lies in host memory, not on the {device} device"
                raise Untestable(msg)
            stands[mover] = (made, Carver(made))
        for number in range(rounds + 1):
            for mover, (made, carver) in stands.items():
                carver.carve(mask)
                report = complete(made, mask)
                # The first pays for what is needed once.
                if number:
                    seconds[mover].append(report.seconds)
                if mover == "auto":
                    graphs, scratch = report.graphs or 0, report.scratch or 0
                tick()
    ours = interval(seconds["auto"])
    published, staged = (
        interval([a / b for a, b in zip(seconds[each], seconds["auto"], strict=True)])
        for each in MOVERS[1:]
    )
    return Figure(
        GROUP,
        f"{device}, {_what(cache, pattern)}",
        f"{ours.median * 1e3:.0f} ms in {graphs} graphs; the published algorithm takes "
        f"{published.format(1)} times, the way by the host {staged.format(1)} times as long",
        "never slower than the published algorithm",
        published.high >= 1.0,
        f"scratch: {scratch / 1e6:.1f} MB",
        f"{rounds} interleaved rounds",
        dict(seconds),
    )


def _what(cache: Cache, pattern: str) -> str:
    return f"{cache.shape}, {cache.cells} cells, {pattern}, {cache.setting.name}"
