"""Measure complete defragmentations in device buffers: behind RPC on loopback, or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pyllamakv
from pyllamakv.errors import KvError, Untestable
from pyllamakv.runtime.model import Mover
from pyllamakv.scenarios.device_placement import ALL, DevicePlacement
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import defrag_workloads
from qa.bench.contexts import context, model
from qa.bench.defrag_workloads import SETTINGS, CacheShape, CacheTypes, Live
from qa.bench.figure import Figure
from qa.bench.fragmentation import Fragmenter
from qa.bench.measure import interval
from qa.bench.rounds import complete

GROUP = "Devices"
Tick = Callable[[], None]

#: The mover that the patch selects, the published algorithm's, and a copy through the host.
MOVERS: tuple[Mover, ...] = ("auto", "graph", "staged")

#: The targets, and the minimum ratio of the published algorithm's time to ours.
NEVER_SLOWER = ("never slower than the published algorithm", 1.0)
TARGETS = {
    "CUDA": (">= 10 x the published algorithm, >= 50 % of the bandwidth with V in rows", 10.0)
}

#: Small, because the published algorithm takes minutes over a network.
RPC_PLAN = tuple(
    (CacheShape("1B", setting, 4096), pattern)
    for setting in SETTINGS[:2]
    for pattern in ("alternate", "runs of 16")
)
CUDA_PLAN = tuple(
    (CacheShape("8B", setting, cells), "alternate")
    for cells in (16384, 65536, 131072)
    for setting in SETTINGS[:2]
)


def figures(tick: Tick, release: str = TEST_RELEASE, rounds: int = 15) -> list[Figure]:
    """Measure with a server on loopback; `hardware` measures on a GPU."""
    return on(tick, "rpc", release, rounds)


def on(
    tick: Tick,
    backend: str,
    release: str = TEST_RELEASE,
    rounds: int = 15,
    budget: float | None = None,
) -> list[Figure]:
    """Measure on a backend's device, with rounds of at most ``budget`` seconds.

    A workload that does not fit into the time or the device's memory, or that fails, has a row with
    the reason.
    """
    plan = CUDA_PLAN if backend == "cuda" else RPC_PLAN
    spec = f"{release}+patched"
    until = time.monotonic() + (float("inf") if budget is None else budget)
    with ExitStack() as opened:
        endpoint = (
            opened.enter_context(pyllamakv.serve_rpc(spec)).endpoint if backend == "rpc" else ""
        )
        env = DevicePlacement(backend).environment
        library = opened.enter_context(
            pyllamakv.open(spec, isolated=True, env=env, backend=backend)
        )
        stand = DeviceBenchmark(backend.upper(), library, rounds, tick, until, endpoint or None)
        return [
            _row(stand, cache, pattern, len(plan) - number)
            for number, (cache, pattern) in enumerate(plan)
        ]


@dataclass(frozen=True)
class DeviceBenchmark:
    """The device, the workloads, and the time limit.

    ``paces`` are the seconds per byte of a cache, by setting: contexts and two rounds.
    """

    device: str
    library: pyllamakv.OpenLibrary
    rounds: int
    tick: Tick
    until: float
    endpoint: str | None = None
    paces: dict[CacheTypes, float] = field(default_factory=dict)

    @property
    def target(self) -> tuple[str, float]:
        """Return the target for the device, and its factor."""
        return TARGETS.get(self.device, NEVER_SLOWER)

    @property
    def left(self) -> float:
        """Return the remaining seconds of all workloads."""
        return self.until - time.monotonic()

    def needs(self, cache: CacheShape) -> float:
        """Return the minimum seconds for a cache, estimated from those measured before."""
        paces = self.paces
        return cache.bytes * paces.get(cache.setting, max(paces.values(), default=0.0))


def _row(stand: DeviceBenchmark, cache: CacheShape, pattern: str, among: int) -> Figure:
    """Measure one cache of the ``among`` remaining ones, or return a row with the reason."""
    try:
        return _measure(stand, cache, pattern, among)
    except KvError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        name = f"{stand.device}, {_what(cache, pattern)}"
        return Figure(GROUP, name, f"not measured: {reason}", stand.target[0])


def _measure(stand: DeviceBenchmark, cache: CacheShape, pattern: str, among: int) -> Figure:
    left, needed = stand.left, stand.needs(cache)
    if left <= max(needed, 0.0):
        msg = f"it takes {needed:.0f} s or more, {max(left, 0.0):.0f} s are left"
        raise Untestable(msg)
    begin = time.monotonic()
    rounds = Rounds(stand, begin, until=begin + left / among)
    with (
        stand.library.load_model(
            model(cache.shape), n_gpu_layers=ALL, rpc_servers=stand.endpoint
        ) as loaded,
        ExitStack() as opened,
    ):
        _need_memory(stand, cache)
        stands = {}
        for mover in MOVERS:
            made = opened.enter_context(context(loaded, cache, defrag_mover=mover))
            if made.kv.snapshot().streams[0].info.host > 0:
                msg = f"the cache is in host memory, not on the {stand.device} device"
                raise Untestable(msg)
            stands[mover] = (made, Fragmenter(made))
        rounds.run(stands, cache, defrag_workloads.live(pattern, cache.cells))
    seconds = rounds.seconds
    ours = interval(seconds["auto"])
    published, staged = (
        interval([a / b for a, b in zip(seconds[each], seconds["auto"], strict=True)])
        for each in MOVERS[1:]
    )
    target, factor = stand.target
    # The device's copy bandwidth is only in its data sheet: the factor alone can miss the target.
    met = published.high >= factor and (None if stand.device in TARGETS else True)
    # Each byte is read and written.
    rate = 2 * rounds.bytes / ours.median / 1e9
    return Figure(
        GROUP,
        f"{stand.device}, {_what(cache, pattern)}",
        f"{ours.median * 1e3:.0f} ms in {rounds.graphs} graphs; the published algorithm takes "
        f"{published.format(1)} times, copying through the host {staged.format(1)} times as long",
        target,
        met,
        f"{rate:.1f} GB/s read and written; scratch: {rounds.scratch / 1e6:.1f} MB",
        f"{len(seconds['auto'])} interleaved rounds",
        dict(seconds),
    )


class Rounds:
    """Run all movers alternately until the time is up.

    The first two rounds start if any time is left.
    """

    def __init__(self, stand: DeviceBenchmark, begin: float, until: float) -> None:
        self.stand, self.begin, self.until = stand, begin, until
        self.seconds: dict[str, list[float]] = {each: [] for each in MOVERS}
        self.graphs = self.scratch = self.bytes = 0

    def run(
        self,
        stands: dict[Mover, tuple[pyllamakv.Context, Fragmenter]],
        cache: CacheShape,
        mask: Live,
    ) -> None:
        """Fill ``seconds``; raises Untestable if not even one round fits."""
        took = dict.fromkeys(MOVERS, 0.0)
        for number in range(self.stand.rounds + 1):
            end = self.until if number > 1 else self.stand.until
            seconds: dict[str, float] = {}
            for mover, (made, carver) in stands.items():
                start = time.monotonic()
                # Incomplete rounds do not count: a round that cannot end in time is not started.
                rest = MOVERS[MOVERS.index(mover) :]
                if start + sum(took[each] for each in rest) > end:
                    return self._ended()
                carver.fragment(mask)
                report = complete(made, mask)
                took[mover] = time.monotonic() - start
                seconds[mover] = report.seconds
                if mover == "auto":
                    self.graphs, self.scratch = report.graphs or 0, report.scratch or 0
                    self.bytes = report.bytes or 0
                self.stand.tick()
            # The first round includes one-time initialization.
            for each, value in seconds.items() if number else ():
                self.seconds[each].append(value)
            if number == 1:
                self.stand.paces[cache.setting] = (time.monotonic() - self.begin) / cache.bytes
        return None

    def _ended(self) -> None:
        if not self.seconds["auto"]:
            msg = f"{time.monotonic() - self.begin:.0f} s were too few for one round"
            raise Untestable(msg)


def _need_memory(stand: DeviceBenchmark, cache: CacheShape) -> None:
    """Raise Untestable if the device does not have memory for a cache per mover."""
    there = [each.memory_free for each in stand.library.devices() if each.kind == "gpu"]
    needed = len(MOVERS) * cache.bytes + defrag_workloads.BESIDE
    # Some backends do not report it.
    if all(there) and there and needed > sum(there):
        msg = f"it needs {needed / 1e9:.0f} GB, {sum(there) / 1e9:.0f} GB are free on the device"
        raise Untestable(msg)


def _what(cache: CacheShape, pattern: str) -> str:
    return f"{cache.shape}, {cache.cells} cells, {pattern}, {cache.setting.name}"
