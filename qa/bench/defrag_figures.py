"""Convert measured defragmentations into figures."""

from __future__ import annotations

import statistics

from qa.bench.figure import Figure
from qa.bench.measure import Interval
from qa.bench.rounds import Measured


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
    return figures + _share(group, found)


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
