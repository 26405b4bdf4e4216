"""Count the lines of ports, and compare complete defragmentations with those of earlier patches."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from pyllamakv.building import variant
from pyllamakv.errors import UsageError
from pyllamakv.home import data
from pyllamakv.patching import series, shared_files
from qa.bench import defrag_workloads
from qa.bench.contexts import opened
from qa.bench.defrag_workloads import SETTINGS, CacheShape
from qa.bench.figure import Figure
from qa.bench.fragmentation import Fragmenter
from qa.bench.measure import Pairs, interleave, interval
from qa.bench.rounds import complete

GROUP = "Ports"
Tick = Callable[[], None]

#: Number of cells of the caches; every second one is used.
CELLS = 16384

#: Processes of a comparison.
ROUNDS = 30


def figures(tick: Tick, old: Iterable[str] = (), pairs: int = 5) -> list[Figure]:
    """Count the lines of every patch, and compare with builds of earlier patches.

    ``old`` are the ids of these variants. Raises UsageError for an id that is not built here.
    """
    compared = [_older(name) for name in old]
    return [
        _lines(),
        *_changed(),
        *(_ratio(each, CacheShape("1B", setting, CELLS), pairs, tick)
          for each in compared for setting in SETTINGS[:3]),
    ]  # fmt: skip


def _older(name: str) -> variant.Variant:
    found = variant.by_id(name)
    if found is None:
        msg = f"there is no variant {name} in {variant.built()}; `--old` takes the id of a build"
        raise UsageError(msg)
    return found


def _lines() -> Figure:
    """Count the lines of all files below patches/, and of the shared files among them."""
    root = data("patches")
    counts = {
        path: len(path.read_bytes().splitlines()) for path in root.rglob("*") if path.is_file()
    }
    shared = sum(n for path, n in counts.items() if root / shared_files.FOLDER in path.parents)
    ports = sum(n for path, n in counts.items() if path.suffix == ".patch")
    return Figure(
        GROUP,
        "lines in patches/",
        f"{sum(counts.values()):,}",
        how=f"{ports:,} in ports, {shared:,} in shared files, the rest in descriptions",
        data={"ports": ports, "shared": shared, "all": sum(counts.values())},
    )


def _changed() -> list[Figure]:
    """Count the lines that each port adds and removes outside the shared files."""
    found = []
    for definition in series.load():
        counts = {
            text.base: sum(
                len(hunk.added) + len(hunk.removed)
                for file in text.patch.files
                if file.path not in definition.shared
                for hunk in file.hunks
            )
            for text in definition.ports
        }
        values = sorted(counts.values())
        median = statistics.median_low(values)
        row = {
            "patch": definition.id,
            "ports": str(len(values)),
            "minimum": str(values[0]),
            "median": str(median),
            "maximum": str(values[-1]),
        }
        title = "Changed lines (added and removed) per port, shared files left out."
        found.append(Figure(GROUP, definition.id, str(median), data=counts, table=title, row=row))
    return found


def _ratio(
    old: variant.Variant, cache: CacheShape, pairs: int, tick: Tick, rounds: int = ROUNDS
) -> Figure:
    """Defragment the same cache with the present build of the release and with an older one.

    The placement of libraries and caches in memory changes times by some percent for the life of a
    process. Each round therefore runs in a new process, in which the two libraries are opened in
    alternating order, and the interval is that of the rounds' medians.
    """
    release = old.manifest.release
    specs = {"new": f"{release}+patched", "old": str(old.folder)}
    times: dict[str, list[float]] = {"new": [], "old": []}
    ratios = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for number in range(rounds):
            order = list(specs) if number % 2 else list(specs)[::-1]
            found = processes.submit(
                _round, {name: specs[name] for name in order}, cache, pairs
            ).result()
            times["new"] += found.first
            times["old"] += found.second
            ratios.append(found.ratio.median)
            tick()
    ratio = interval(ratios)
    return Figure(
        GROUP,
        f"complete defragmentation, current patches over earlier ones: {release}, {cache.cells} "
        f"cells, {cache.setting.name}",
        f"{ratio.format(3)} x {statistics.median(times['old']) * 1e3:.1f} ms",
        target="interval not entirely above 1.0",
        met=ratio.low <= 1.0,
        how=f"{rounds} processes of {pairs} interleaved pairs; earlier: {Path(old.folder).name}",
        data={**times, "ratios": ratios},
    )


def _round(specs: dict[str, str], cache: CacheShape, pairs: int) -> Pairs:
    """Open the libraries in the order of ``specs``, and measure pairs of "new" and "old"."""
    mask = defrag_workloads.live("alternate", cache.cells)
    with ExitStack() as stack:
        contexts = {name: stack.enter_context(opened(spec, cache)) for name, spec in specs.items()}
        carvers = {name: Fragmenter(context) for name, context in contexts.items()}

        def measured(name: str) -> float:
            carvers[name].fragment(mask)
            return complete(contexts[name], mask).seconds

        return interleave(lambda: measured("new"), lambda: measured("old"), pairs=pairs)
