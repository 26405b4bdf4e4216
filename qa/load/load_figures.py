"""Summarize the cells of a load test as figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from pyllamakv.scenarios import synthetic_models
from pyllamakv.server.server_lab import SLOT
from qa.bench.figure import Figure
from qa.bench.measure import Interval, interval
from qa.load.load_result import LoadResult, percentiles
from qa.load.request_schedule import WORKLOADS, cells, overcommit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qa.load.load_cells import LoadCell

#: Targets of a ratio without a limit, for measures of which less is better, and of which more is.
TARGET: Final = "interval not entirely above 1.0"
TARGET_MORE: Final = "interval not entirely below 1.0"

#: Minimum number of pairs of rounds for a ratio.
PAIRS = 5


def figures(results: Mapping[LoadCell, LoadResult]) -> list[Figure]:
    """Return a row per cell over its rounds, and ratios between the systems.

    A ratio needs `PAIRS` rounds in which no request was lost.
    """
    found: list[Figure] = []
    ordered = sorted(results, key=lambda cell: (cell.release, cell.workload, cell.clients))
    for _, group in groupby(ordered, lambda cell: (cell.release, cell.workload, cell.clients)):
        members = list(group)
        sides: dict[str, list[LoadResult]] = {}
        for cell in sorted(members, key=lambda cell: cell.round):
            sides.setdefault(cell.system, []).append(results[cell])
        first = members[0]
        rows = [_row(replace(first, system=system), runs) for system, runs in sides.items()]
        stock = next((row.value for row in rows if row.row["system"] == "stock"), "")
        found += [
            replace(row, limit=f"stock: {stock}") if stock and row.target else row for row in rows
        ]
        found += _ratios(first, sides)
    return found + _longest_waits(results)


def _longest_waits(results: Mapping[LoadCell, LoadResult]) -> list[Figure]:
    """Compare the longest request of an overcommitted cache with those of one that has all cells.

    A round of the latter is required. Stock has no target.
    """
    found: list[Figure] = []
    runs: dict[tuple[str, str, int, str], list[tuple[LoadCell, LoadResult]]] = {}
    for cell, one in results.items():
        key = cell.release, cell.system, cell.clients, cell.workload
        runs.setdefault(key, []).append((cell, one))
    for (release, system, clients, workload), members in sorted(runs.items()):
        times = overcommit(workload)
        usual = runs.get((release, system, clients, "overcommit-1"))
        if times < 2 or not usual or system == "stock":
            continue
        p99 = percentiles(tuple(each for _, one in usual for each in one.durations))[2]
        longest = max((each for _, one in members for each in one.durations), default=float("nan"))
        cell = members[0][0]
        found.append(
            Figure(
                group(cell),
                f"longest request over the p99 of overcommit-1, {system}, {clients} clients",
                f"{longest / p99:.2f}",
                f"at most {3 * times}",
                longest <= 3 * times * p99,
                "",
                _how(cell),
                {"longest": longest, "p99": p99},
            )
        )
    return found


def group(cell: LoadCell) -> str:
    """Return the group of a cell's figures, which are replaced together."""
    model = cell.plan.model
    more = "" if model == synthetic_models.TEST else f", {Path(model).name}"
    return f"llama-server {cell.release}, {cell.workload}{more}"


def _row(cell: LoadCell, runs: Sequence[LoadResult]) -> Figure:
    count = sum(len(run.timings) for run in runs)
    lost = sum(run.lost for run in runs)
    deaths = sum(len(run.deaths) for run in runs)
    first = percentiles(tuple(each for run in runs for each in run.first_token))
    token = percentiles(tuple(each for run in runs for each in run.per_token))
    cpu = [run.cpu_per_token for run in runs if run.tokens]
    ours = cell.system != "stock"
    plan = cell.plan
    return Figure(
        group(cell),
        f"{cell.system}, {cell.clients} clients",
        f"{lost} of {count:,} requests lost",
        "0" if ours else "",
        lost == 0 if ours else None,
        "",
        _how(cell),
        {
            "requests": count,
            "lost": lost,
            "deaths": deaths,
            "rounds": len(runs),
            "rate": plan.rate,
            "cpu_per_token": cpu,
            "tokens_per_second": [run.tokens_per_second for run in runs],
        },
        table=_how(cell),
        row={
            "system": cell.system,
            "clients": str(cell.clients),
            "requests": f"{count:,}",
            "lost": f"{lost:,}",
            "aborts": str(deaths),
            "retries": str(sum(run.retries for run in runs)),
            "tokens/s": f"{median(run.tokens_per_second for run in runs):,.0f}",
            "first token, ms (p50, p95, p99)": _milliseconds(first),
            "per token, ms (p50, p95, p99)": _milliseconds(token),
            "CPU per token, ms": f"{1e3 * median(cpu):.3f}" if cpu else "",
        },
    )


def _how(cell: LoadCell) -> str:
    plan = cell.plan
    shared = cells(cell.workload, cell.clients)
    size = (
        f"{shared} cells" if shared else f"{plan.rate:g} requests per second, slots of {SLOT} cells"
    )
    return (
        f"{WORKLOADS[cell.workload]} {size}, {plan.threads} thread{'s' * (plan.threads != 1)}, "
        f"{plan.model_file.name}"
    )


def _ratios(cell: LoadCell, sides: Mapping[str, Sequence[LoadResult]]) -> list[Figure]:
    found = []
    for one, other, measures in (
        ("patched", "stock", (_CPU, *_LATENCIES)),
        ("batcher", "patched", (_CPU, _SPEED)),
        ("serve", "patched", _SERVE),
    ):
        if one not in sides or other not in sides:
            continue
        pairs = list(zip(sides[one], sides[other], strict=True))
        if len(pairs) < PAIRS or any(run.lost for pair in pairs for run in pair):
            continue
        for each in measures:
            ratio = interval([each.value(a) / each.value(b) for a, b in pairs])
            found.append(_ratio(cell, each, f"{one} over {other}", ratio, len(pairs)))
    if "serve" in sides and "batcher" in sides:
        pairs = list(zip(sides["serve"], sides["batcher"], strict=True))
        if len(pairs) >= PAIRS and not any(run.lost for pair in pairs for run in pair):
            found.append(_http(cell, pairs))
    return found


def _http(cell: LoadCell, pairs: Sequence[tuple[LoadResult, LoadResult]]) -> Figure:
    """Return the CPU time of HTTP: that of `serve` without that of its batching loop."""
    cost = interval([1e3 * (a.cpu_per_token - b.cpu_per_token) for a, b in pairs])
    return Figure(
        group(cell),
        f"CPU per token of HTTP, serve without the batcher, {cell.clients} clients",
        cost.format(3, "ms"),
        f"median at most {HTTP_MS:g} ms",
        cost.median <= HTTP_MS,
        "",
        f"{len(pairs)} pairs; {_how(cell)}",
        {"median": cost.median, "low": cost.low, "high": cost.high},
        samples=len(pairs),
    )


def _p95(values: tuple[float, ...]) -> float:
    return percentiles(values)[1]


#: Limit of the CPU time of HTTP per token in milliseconds: 5 % of a token of SmolLM2 on one thread.
HTTP_MS: Final = 0.6


@dataclass(frozen=True)
class Measure:
    """What is compared: its name, how it follows from a run, whether more is better, its limit."""

    name: str
    value: Callable[[LoadResult], float]
    more: bool = False
    #: Limit of the median; None: the interval must not be entirely on the wrong side of 1.0.
    limit: float | None = None

    def judge(self, ratio: Interval) -> tuple[str, bool]:
        """Return the target of a ratio, and whether it is met."""
        if self.limit is None:
            met = ratio.high >= 1.0 if self.more else ratio.low <= 1.0
            return TARGET_MORE if self.more else TARGET, met
        if self.more:
            return f"median at least {self.limit:g}", ratio.median >= self.limit
        return f"median at most {self.limit:g}", ratio.median <= self.limit


_CPU: Final = Measure("CPU per token", lambda run: run.cpu_per_token)
_SPEED: Final = Measure("tokens per second", lambda run: run.tokens_per_second, more=True)
_LATENCIES: Final = (
    Measure("p95 of the first token", lambda run: _p95(run.first_token)),
    Measure("p95 of the time per token", lambda run: _p95(run.per_token)),
)
#: `pyllamakv serve` over llama-server with the same libraries.
_SERVE: Final = (
    replace(_CPU, limit=1.05),
    replace(_SPEED, limit=1.0),
    replace(_LATENCIES[0], limit=1.0),
)


def _ratio(cell: LoadCell, measure: Measure, systems: str, ratio: Interval, pairs: int) -> Figure:
    target, met = measure.judge(ratio)
    # The model of the tests decodes a token in less time than HTTP takes: its ratios are reported.
    reported = measure in _SERVE and cell.plan.model == synthetic_models.TEST
    return Figure(
        group(cell),
        f"{measure.name}, {systems}, {cell.clients} clients",
        ratio.format(),
        "" if reported else target,
        None if reported else met,
        "",
        f"{pairs} pairs; {_how(cell)}",
        {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        samples=pairs,
    )


def _milliseconds(values: tuple[float, float, float]) -> str:
    return ", ".join(
        f"{1e3 * value:,.0f}" if value >= 0.1 else f"{1e3 * value:.3g}"
        for value in values
        if not math.isnan(value)
    )
