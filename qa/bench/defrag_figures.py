"""Convert measured defragmentations into figures: the targets, and a table of all workloads."""

from __future__ import annotations

import statistics

from qa.bench.figure import Figure
from qa.bench.measure import Interval
from qa.bench.rounds import Measured

CAPTION = (
    "Milliseconds; times the strided copy; times memcpy; how many times as long the published "
    "algorithm takes (interleaved rounds; those of the published algorithm where they are fewer)."
)


def table(group: str, found: list[Measured]) -> list[Figure]:
    """Return a row per shape, number of cells and pattern, with a column per setting."""
    rows: dict[tuple[str, int, str], list[Measured]] = {}
    for each in found:
        rows.setdefault((each.cache.shape, each.cache.cells, each.pattern), []).append(each)
    figures = []
    for (shape, cells, pattern), settings in rows.items():
        texts = {each.cache.setting.name: _cell(each) for each in settings}
        figures.append(
            Figure(
                group,
                f"{shape}, {cells} cells, {pattern}",
                "",
                data={each.cache.setting.name: each.to_json() for each in settings},
                table=f"The cache of a {shape} model. {CAPTION}",
                row={"cells": str(cells), "live": pattern, **texts},
            )
        )
    return figures


def _cell(found: Measured) -> str:
    if found.skipped:
        return found.skipped
    rounds, published = len(found.ours), len(found.published)
    fewer = "" if published == rounds else f"; {published}"
    return (
        f"{statistics.median(found.ours) * 1e3:.1f} ms, {found.over_strided.median:.2f}, "
        f"{found.over_straight.median:.1f}, {found.faster.median:.1f} ({rounds}{fewer})"
    )


def targets(group: str, everything: list[Measured]) -> list[Figure]:
    """Return the targets of complete defragmentations, each with its worst workload."""
    found = [each for each in everything if not each.skipped]
    flash = [each for each in found if not each.cache.transposed]
    none = [each for each in found if each.cache.transposed]
    figures = []
    for name, chosen in (("with", flash), ("no", none)):
        name += " flash attention, "
        alternate = [each for each in chosen if each.pattern == "alternate"]
        figures += _bound(group, name + "alternate cells", alternate, chosen is flash)
        if len(alternate) < len(chosen):
            figures += _bound(group, name + "every pattern", chosen, chosen is flash)
        figures += _factor(group, name + "alternate cells", alternate, 20)
    figures += _factor(group, "every workload", found, 1)
    figures += _share(group, found) + _growth(group, found) + _plans(group, found)
    return figures


def _where(found: Measured) -> str:
    cache = found.cache
    return f"{cache.shape}, {cache.cells} cells, {found.pattern}, {cache.setting.name}"


def _pairs(n: int, of: int) -> str:
    return f"{n} interleaved pairs; the worst of {of}"


def _bound(group: str, name: str, found: list[Measured], strided: bool) -> list[Figure]:
    if not found:
        return []
    worst = max(found, key=lambda each: _limit(each, strided).median)
    value, other = _limit(worst, strided), _limit(worst, not strided)
    names = ("a strided copy of the same rows", "memcpy of the same bytes")
    target = 1.2 if strided else 3.0
    return [
        Figure(
            group,
            f"{name}, over {names[not strided]}",
            f"{value.format()} x ({_where(worst)})",
            f"<= {target} x",
            value.median <= target,
            f"{other.format()} x {names[strided]} ({worst.bytes / 1e6:.0f} MB)",
            _pairs(len(worst.ours), len(found)),
            samples=len(worst.ours),
        )
    ]


def _limit(found: Measured, strided: bool) -> Interval:
    return found.over_strided if strided else found.over_straight


def _factor(group: str, name: str, found: list[Measured], target: int) -> list[Figure]:
    if not found:
        return []
    worst = min(found, key=lambda each: each.faster.median)
    best = max(found, key=lambda each: each.faster.median)
    room = [b / a for a, b in zip(worst.strided, worst.published, strict=False)]
    return [
        Figure(
            group,
            f"{name}: the published algorithm over the patch",
            f"{worst.faster.format(1)} x ({_where(worst)}) to {best.faster.median:.0f} x",
            f">= {target} x",
            worst.faster.median >= target,
            f"over the strided copy: {statistics.median(room):.1f} x",
            _pairs(len(worst.published), len(found)),
            samples=len(worst.published),
        )
    ]


def _share(group: str, found: list[Measured]) -> list[Figure]:
    def share(each: Measured) -> float:
        return statistics.median(each.plan) / statistics.median(each.ours)

    found = [each for each in found if each.plan]
    if not found:
        return []
    worst = max(found, key=share)
    micro = statistics.median(worst.plan) * 1e6
    return [
        Figure(
            group,
            "the plan, as a fraction of the defragmentation",
            f"{share(worst):.1%}: {micro:.0f} us ({_where(worst)})",
            "<= 2 %",
            share(worst) <= 0.02,
            "",
            _pairs(len(worst.plan), len(found)),
            samples=len(worst.plan),
        )
    ]


def _growth(group: str, found: list[Measured]) -> list[Figure]:
    """Compare the time per moved byte of the smallest caches that exceed the processor's caches."""
    figures = []
    chosen = [e for e in found if e.pattern == "alternate" and e.cache.cells >= 16384]
    for name in dict.fromkeys((each.cache.shape, each.cache.setting.name) for each in chosen):
        line = [e for e in chosen if (e.cache.shape, e.cache.setting.name) == name]
        line.sort(key=lambda each: each.cache.cells)
        if len(line) < 2:
            continue
        first, last = line[0], line[-1]
        ours, limit = (
            (statistics.median(b) / last.bytes) / (statistics.median(a) / first.bytes)
            for a, b in ((first.ours, last.ours), (first.strided, last.strided))
        )
        figures.append(
            Figure(
                group,
                f"time per moved byte, {last.cache.cells} over {first.cache.cells} cells, "
                f"alternate, {', '.join(name)}",
                f"{ours:.2f} x",
                "<= 1.1 x, or the strided copy's: linear",
                ours <= 1.1 * max(1.0, limit),
                f"the strided copy: {limit:.2f} x",
                f"medians of {len(last.ours)} and {len(first.ours)} rounds",
            )
        )
    return figures


def _plans(group: str, found: list[Measured]) -> list[Figure]:
    """Return the maximum gain of a plan with fewer, longer moves."""
    if not found:
        return []
    worst = max(found, key=lambda each: each.moves / max(each.least_moves, 1))
    over = worst.moves / max(worst.least_moves, 1)
    scratch = max(found, key=lambda each: each.scratch)
    figures = [
        Figure(
            group,
            "moves, over the fewest that any plan of the same cells needs",
            f"{over:.2f} x: {worst.moves} of {worst.least_moves} ({_where(worst)})",
            "",
            None,
            "1 x: each hole and each run of live cells after it needs one",
            f"counted; the worst of {len(found)}",
        )
    ]
    if scratch.scratch:
        figures.append(
            Figure(
                group,
                "memory beyond the cache at the peak",
                f"{scratch.scratch / 1e6:.2f} MB ({_where(scratch)})",
                "",
                None,
                f"the cache: {scratch.cache.bytes / 1e6:.0f} MB",
                f"counted; the worst of {len(found)}",
            )
        )
    return figures
