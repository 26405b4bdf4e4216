"""Count what ports change, and compare complete defragmentations with those of earlier patches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from pyllamakv.bench import workloads
from pyllamakv.bench.carving import Carver
from pyllamakv.bench.figure import Figure
from pyllamakv.bench.measure import interleave
from pyllamakv.bench.rounds import complete
from pyllamakv.bench.stands import opened
from pyllamakv.bench.workloads import SETTINGS, Cache
from pyllamakv.building import variant
from pyllamakv.errors import UsageError
from pyllamakv.home import data
from pyllamakv.patching import series, shared_files

GROUP = "Ports"
Tick = Callable[[], None]

#: Cells of the caches that are defragmented; every other one is in use.
CELLS = 16384


def figures(tick: Tick, old: Iterable[str] = (), pairs: int = 30) -> list[Figure]:
    """Count lines of every patch; ``old`` are ids of variants of earlier patches to compare with.

    Raises UsageError for an id that is not built here.
    """
    compared = [_older(name) for name in old]
    return [
        _lines(),
        *_changed(),
        *(_ratio(each, Cache("1B", setting, CELLS), pairs, tick)
          for each in compared for setting in SETTINGS[:3]),
    ]  # fmt: skip


def _older(name: str) -> variant.Variant:
    found = variant.at(name)
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
            for text in definition.texts
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


def _ratio(old: variant.Variant, cache: Cache, pairs: int, tick: Tick) -> Figure:
    """Defragment the same cache with today's build of the release and with an older one."""
    release = old.manifest.release
    mask = workloads.live("alternate", cache.cells)
    now = f"{release}+patched"
    with opened(now, cache) as new_context, opened(str(old.folder), cache) as old_context:
        carvers = [(Carver(each), each) for each in (new_context, old_context)]

        def measured(index: int) -> float:
            carver, context = carvers[index]
            carver.carve(mask)
            return complete(context, mask).seconds

        found = interleave(lambda: measured(0), lambda: measured(1), pairs=pairs, progress=tick)
    return Figure(
        GROUP,
        f"complete defragmentation, today's patches over earlier ones: {release}, {cache.cells} "
        f"cells, {cache.setting.name}",
        f"{found.ratio.format(3)} x {statistics.median(found.second) * 1e3:.1f} ms",
        target="interval not entirely above 1.0",
        met=found.ratio.low <= 1.0,
        how=f"{len(found.first)} interleaved pairs; earlier: {Path(old.folder).name}",
        data={"new": found.first, "old": found.second},
    )
