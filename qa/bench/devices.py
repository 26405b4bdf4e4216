"""Measure defragmentations and sparse caches in device buffers: behind RPC, or on a GPU."""

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
from qa.bench import defrag_workloads, sparse
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
_NAMES = {"graph": "the published algorithm takes", "staged": "copying through the host takes"}

#: Cells up to which the published algorithm is measured on a GPU: on an H100, it takes 3.7 s for
#: 16,384.
PUBLISHED_CELLS = 16384

#: The least part of the device's bandwidth that a defragmentation with V in rows must reach.
SHARE = 0.5

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

#: Cells of the sparse cache: on a GPU, the context of current models. A CPU would need hours.
SPARSE_CELLS = {"cuda": 131072}
SMALL_SPARSE_CELLS = 4096

#: Compactions whose median is reported, after one that does not count.
COMPACTIONS = 3


def figures(tick: Tick, release: str = TEST_RELEASE, rounds: int = 15) -> list[Figure]:
    """Measure with a server on loopback; `hardware` measures on a GPU."""
    return on(tick, "rpc", release, rounds)


def on(
    tick: Tick,
    backend: str,
    release: str = TEST_RELEASE,
    rounds: int = 15,
    budget: float | None = None,
    bandwidth: float = 0.0,
) -> list[Figure]:
    """Measure on a backend's device, with rounds of at most ``budget`` seconds.

    ``bandwidth`` is what the device reads and writes per second in bytes while it copies its own
    memory (0: unknown).

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
        library = opened.enter_context(_open(spec, backend))
        stand = DeviceBenchmark(
            backend.upper(), library, rounds, tick, until, endpoint or None, bandwidth=bandwidth
        )
        return [
            _row(stand, cache, pattern, len(plan) - number)
            for number, (cache, pattern) in enumerate(plan)
        ]


def sparse_on(tick: Tick, backend: str, release: str, cells: int = 0, pairs: int = 30) -> Figure:
    """Measure decoding in a sparse cache on a device, and after a compaction.

    Both caches have the size that an 8B model has, with ``cells`` (0: `SPARSE_CELLS`). Raises
    Untestable if one is in host memory or the device lacks memory, and KvError for other failures.
    """
    cells = cells or SPARSE_CELLS.get(backend, SMALL_SPARSE_CELLS)
    cache = CacheShape("8B", SETTINGS[0], cells)
    place = DevicePlacement(backend)
    with ExitStack() as stack:
        spec = f"{release}+patched"
        endpoint = stack.enter_context(pyllamakv.serve_rpc(spec)).endpoint if place.remote else None
        library = stack.enter_context(_open(spec, backend))
        _need_memory(library, 2 * cache.bytes)
        loaded = stack.enter_context(
            library.load_model(model(cache.shape), n_gpu_layers=ALL, rpc_servers=endpoint)
        )
        how = sparse.options(cells, {"flash_attn": True})
        full, fresh = (stack.enter_context(loaded.context(**how)) for _ in range(2))
        place.check(full.kv.snapshot())
        other = sparse.alone(fresh)
        compactions = []
        for _ in range(COMPACTIONS):
            live = _decode_scattered(full, tick)
            compactions.append(full.kv.defrag(fallback=False))
            live.close()
        live = _decode_scattered(full, tick)
        before = sparse.compare(live, other, pairs, tick, warm=1)
        compactions.append(full.kv.defrag(fallback=False))
        after = sparse.compare(live, other, pairs, tick, warm=1)
    lost, left = before.ratio, after.ratio
    moved = interval([each.seconds for each in compactions[1:]])
    return Figure(
        GROUP,
        f"{backend.upper()}, {release}, 8B, {cells} cells, {sparse.LIVE} live at the end",
        f"decodes {lost.format()} times as long as in a fresh cache; compacted {left.format()} "
        f"times; a compaction moves {compactions[-1].cells} cells in {moved.median * 1e3:.2f} ms",
        "compacted: the interval includes 1.0",
        left.low <= 1.0,
        "",
        f"{pairs} interleaved pairs of {sparse.STEPS} tokens after an unmeasured one, "
        f"{SETTINGS[0].name}; {COMPACTIONS} compactions after an unmeasured one",
        {
            "sparse": before.first,
            "fresh beside sparse": before.second,
            "compacted": after.first,
            "fresh beside compacted": after.second,
            "compaction": [each.seconds for each in compactions],
        },
    )


def _open(spec: str, backend: str) -> pyllamakv.OpenLibrary:
    """Open a library for a device.

    On a GPU in this process: the caches are filled with restored states, which are gigabytes.
    """
    env = DevicePlacement(backend).environment
    return pyllamakv.open(spec, isolated=backend != "cuda", env=env or None, backend=backend)


def _decode_scattered(context: pyllamakv.Context, tick: Tick) -> pyllamakv.Sequence:
    """Fill the cache, and keep the last cells.

    `sparse.scatter` restores a state repeatedly instead, which is slow where a device is remote.
    """
    fillers = [context.sequence() for _ in range((context.info.n_ctx - 512) // sparse.FILLER)]
    for each in fillers:
        each.prefill([i % 32 for i in range(sparse.FILLER)])
        tick()
    live = context.sequence()
    live.prefill([i % 32 for i in range(sparse.LIVE)])
    for each in fillers:
        each.close()
    return live


@dataclass(frozen=True)
class DeviceBenchmark:
    """The device, the workloads, and the time limit.

    ``paces`` are the seconds per byte of a cache, by setting and number of movers: contexts and two
    rounds.
    """

    device: str
    library: pyllamakv.OpenLibrary
    rounds: int
    tick: Tick
    until: float
    endpoint: str | None = None
    paces: dict[tuple[CacheTypes, int], float] = field(default_factory=dict)
    bandwidth: float = 0.0

    @property
    def target(self) -> tuple[str, float]:
        """Return the target for the device, and its factor."""
        return TARGETS.get(self.device, NEVER_SLOWER)

    @property
    def left(self) -> float:
        """Return the remaining seconds of all workloads."""
        return self.until - time.monotonic()

    def movers(self, cache: CacheShape) -> tuple[Mover, ...]:
        """Return the movers that are measured in a cache."""
        slow = self.device in TARGETS and cache.cells > PUBLISHED_CELLS
        return tuple(each for each in MOVERS if each != "graph") if slow else MOVERS

    def needs(self, cache: CacheShape) -> float:
        """Return the minimum seconds for a cache, estimated from those measured before."""
        number = len(self.movers(cache))
        alike = {key[0]: pace for key, pace in self.paces.items() if key[1] == number}
        return cache.bytes * alike.get(cache.setting, max(alike.values(), default=0.0))


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
        _need_memory(stand.library, len(stand.movers(cache)) * cache.bytes)
        stands = {}
        for mover in stand.movers(cache):
            made = opened.enter_context(context(loaded, cache, defrag_mover=mover))
            if made.kv.snapshot().streams[0].info.host > 0:
                msg = f"the cache is in host memory, not on the {stand.device} device"
                raise Untestable(msg)
            stands[mover] = (made, Fragmenter(made))
        rounds.run(stands, cache, defrag_workloads.live(pattern, cache.cells))
    seconds = rounds.seconds
    ours = interval(seconds["auto"])
    others = {
        each: interval([a / b for a, b in zip(seconds[each], seconds["auto"], strict=True)])
        for each in stand.movers(cache)[1:]
    }
    target, factor = stand.target
    faster = "graph" not in others or others["graph"].high >= factor
    # Each byte is read and written.
    rate = 2 * rounds.bytes / ours.median
    share = rate / stand.bandwidth if stand.bandwidth else None
    return Figure(
        GROUP,
        f"{stand.device}, {_what(cache, pattern)}",
        f"{ours.median * 1e3:.3g} ms in {rounds.graphs} graphs; "
        + ", ".join(f"{_NAMES[each]} {others[each].format(1)} times" for each in others)
        + " as long",
        target,
        _met(stand, cache, faster, share),
        f"{rate / 1e9:.1f} GB/s read and written"
        + (f", {share:.0%} of the device's copies" if share is not None else "")
        + f"; scratch: {rounds.scratch / 1e6:.1f} MB",
        f"{len(seconds['auto'])} interleaved rounds",
        dict(seconds),
    )


def _met(
    stand: DeviceBenchmark, cache: CacheShape, faster: bool, share: float | None
) -> bool | None:
    """Return whether a workload meets the target of its device, or None if that is unknown."""
    if not faster or stand.device not in TARGETS or not cache.setting.flash_attn:
        return faster
    return None if share is None else share >= SHARE


class Rounds:
    """Run all movers alternately until the time is up.

    The first two rounds start if any time is left.
    """

    def __init__(self, stand: DeviceBenchmark, begin: float, until: float) -> None:
        self.stand, self.begin, self.until = stand, begin, until
        self.seconds: dict[str, list[float]] = {}
        self.graphs = self.scratch = self.bytes = 0

    def run(
        self,
        stands: dict[Mover, tuple[pyllamakv.Context, Fragmenter]],
        cache: CacheShape,
        mask: Live,
    ) -> None:
        """Fill ``seconds``; raises Untestable if not even one round fits."""
        movers = tuple(stands)
        took = dict.fromkeys(movers, 0.0)
        self.seconds = {each: [] for each in movers}
        for number in range(self.stand.rounds + 1):
            end = self.until if number > 1 else self.stand.until
            seconds: dict[str, float] = {}
            for mover, (made, carver) in stands.items():
                start = time.monotonic()
                # Incomplete rounds do not count: a round that cannot end in time is not started.
                rest = movers[movers.index(mover) :]
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
                pace = (time.monotonic() - self.begin) / cache.bytes
                self.stand.paces[cache.setting, len(movers)] = pace
        return None

    def _ended(self) -> None:
        if not self.seconds["auto"]:
            msg = f"{time.monotonic() - self.begin:.0f} s were too few for one round"
            raise Untestable(msg)


def _need_memory(library: pyllamakv.OpenLibrary, size: int) -> None:
    """Raise Untestable if a device does not have memory for caches of ``size`` bytes."""
    there = [each.memory_free for each in library.devices() if each.kind == "gpu"]
    needed = size + defrag_workloads.BESIDE
    # Some backends do not report it.
    if all(there) and there and needed > sum(there):
        msg = f"it needs {needed / 1e9:.0f} GB, {sum(there) / 1e9:.0f} GB are free on the device"
        raise Untestable(msg)


def _what(cache: CacheShape, pattern: str) -> str:
    return f"{cache.shape}, {cache.cells} cells, {pattern}, {cache.setting.name}"
