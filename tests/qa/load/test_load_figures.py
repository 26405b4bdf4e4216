"""Test the rows of cells over rounds, and ratios of enough rounds without losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.scenarios import synthetic_models
from qa.load import load_figures
from qa.load.load_cells import LoadCell, LoadPlan
from qa.load.load_result import LoadResult, RequestTiming


def every(plan: LoadPlan) -> list[LoadCell]:
    """Return the cells of all rounds."""
    return [cell for cells in plan.rounds_of_cells() for cell in cells]


def results(rounds: int, *, lost: bool = False) -> dict[LoadCell, LoadResult]:
    """Return the results of a plan; patched needs twice the CPU time, and time to start."""
    plan = LoadPlan(
        ("0.3.9",), ("fits",), (4,), ("stock", "patched"), rounds=rounds, model=__file__
    )
    error = "ConnectionError: gone" if lost else ""
    wait = {"stock": 1.0, "patched": 2.0}
    return {
        cell: LoadResult(
            (
                RequestTiming(0.0, wait[cell.system] * 0.5, wait[cell.system] * 0.5 + 0.5, 11),
                RequestTiming(
                    0.0,
                    wait[cell.system] * 1.5,
                    wait[cell.system] * 1.5 + 0.5,
                    11,
                    error if cell.system == "stock" else "",
                ),
            ),
            cpu_seconds=1.1 if cell.system == "stock" else 2.2,
            retries=3,
            deaths=((1.0, "SIGABRT"),) if lost and cell.system == "stock" else (),
        )
        for cell in every(plan)
    }


def test_load_rows_sum_the_rounds() -> None:
    """Counts are summed over the rounds; only patched has a target."""
    stock, patched = load_figures.figures(results(2, lost=True))
    assert (stock.value, stock.target, stock.met) == ("2 of 4 requests lost", "", None)
    assert (patched.value, patched.target, patched.met) == ("0 of 4 requests lost", "0", True)
    assert (stock.limit, patched.limit) == ("", "stock: 2 of 4 requests lost")
    assert stock.row["aborts"] == "2"
    assert stock.row["retries"] == "6"
    assert stock.row["first token, ms (p50, p95, p99)"] == "500, 500, 500"
    assert patched.row["per token, ms (p50, p95, p99)"] == "50, 50, 50"
    assert patched.row["CPU per token, ms"] == "100.000"
    assert stock.group == f"llama-server 0.3.9, fits, {Path(__file__).name}"


def test_times_of_lost_requests_are_empty() -> None:
    """A system that answers none has no percentiles."""
    lost = LoadResult((RequestTiming(0.0, 1.0, 1.0, 0, "RequestFailed: 500"),), 1.0)
    (stock, _) = load_figures.figures(dict.fromkeys(results(1), lost))
    assert stock.row["first token, ms (p50, p95, p99)"] == ""
    assert stock.row["per token, ms (p50, p95, p99)"] == stock.row["CPU per token, ms"] == ""


def test_figures_of_another_model_replace_none() -> None:
    """Those of the test model have no name in their group."""
    plan = LoadPlan(("0.3.9",), ("fits",), (4,))
    assert load_figures.group(every(plan)[0]) == "llama-server 0.3.9, fits"


def test_the_longest_request_of_an_overcommitted_cache() -> None:
    """It is compared with the usual ones of the same system and clients; stock has no target."""
    workloads = ("overcommit-1", "overcommit-2")
    plan = LoadPlan(("b11549",), workloads, (8,), ("stock", "patched"), model=__file__)
    ended = {"overcommit-1": 2.0, "overcommit-2": 12.5}
    found = load_figures.figures(
        {
            cell: LoadResult((RequestTiming(1.0, 1.5, 1.0 + ended[cell.workload], 11),), 1.0)
            for cell in every(plan)
        }
    )
    assert len(found) == 5
    assert found[-1].name == "longest request over the p99 of overcommit-1, patched, 8 clients"
    assert (found[-1].value, found[-1].target, found[-1].met) == ("6.25", "at most 6", False)
    assert "4096 cells" in found[0].how
    assert "1280 cells" in found[-1].how


def test_load_ratios_are_paired_by_round() -> None:
    """Rounds are compared in pairs; the target is missed if CPU time doubles."""
    *_, ratio, first, token = load_figures.figures(results(load_figures.PAIRS))
    assert ratio.name == "CPU per token, patched over stock, 4 clients"
    assert (ratio.value, ratio.samples) == ("2.00 [2.00, 2.00]", load_figures.PAIRS)
    assert ratio.met is False
    assert first.name == "p95 of the first token, patched over stock, 4 clients"
    assert first.value == "2.00 [2.00, 2.00]"
    assert first.met is False
    assert token.name == "p95 of the time per token, patched over stock, 4 clients"
    assert (token.value, token.met) == ("1.00 [1.00, 1.00]", True)
    assert len(load_figures.figures(results(load_figures.PAIRS - 1))) == 2
    assert len(load_figures.figures(results(load_figures.PAIRS, lost=True))) == 2


def test_ratios_of_the_batcher() -> None:
    """More tokens per second are better, fewer CPU seconds are."""
    plan = LoadPlan(
        ("0.3.9",), ("fits",), (4,), ("patched", "batcher"), rounds=load_figures.PAIRS,
        model=__file__,
    )  # fmt: skip
    seconds = {"patched": 1.0, "batcher": 2.0}
    runs = {
        cell: LoadResult(
            (RequestTiming(0.0, 0.5, seconds[cell.system], 10),),
            cpu_seconds=1.0 / seconds[cell.system],
        )
        for cell in every(plan)
    }
    _, batcher, cpu, speed = load_figures.figures(runs)
    assert (batcher.name, batcher.target, batcher.met) == ("batcher, 4 clients", "0", True)
    assert cpu.name == "CPU per token, batcher over patched, 4 clients"
    assert (cpu.value, cpu.met) == ("0.50 [0.50, 0.50]", True)
    assert speed.name == "tokens per second, batcher over patched, 4 clients"
    assert (speed.value, speed.met) == ("0.50 [0.50, 0.50]", False)
    assert speed.target == "interval not entirely below 1.0"


@pytest.mark.parametrize(
    ("seconds", "cpu", "met"), [(1.0, 1.04, [True, True, True]), (1.1, 1.06, [False, False, False])]
)
def test_median_of_a_serve_ratio_must_meet_its_limit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, cpu: float, met: list[bool]
) -> None:
    """An interval that contains 1.0 is not enough; ratios of the test model have no target."""
    monkeypatch.setenv(synthetic_models.VARIABLE, __file__)
    for model in (__file__, synthetic_models.TEST):
        plan = LoadPlan(
            ("0.3.9",), ("fits",), (4,), ("patched", "serve"), rounds=load_figures.PAIRS,
            model=model,
        )  # fmt: skip
        runs = {}
        for cell in every(plan):
            # The last round is faster, so that each interval contains 1.0.
            ours = cell.system == "serve"
            last = cell.round == load_figures.PAIRS - 1
            slower = (0.5 if last else seconds) if ours else 1.0
            timing = RequestTiming(0.0, slower / 2, slower, 10)
            runs[cell] = LoadResult((timing,), cpu_seconds=(0.5 if last else cpu) if ours else 1.0)
        *_, cost, speed, first = load_figures.figures(runs)
        targets = ["median at most 1.05", "median at least 1", "median at most 1"]
        for figure, target, each in zip((cost, speed, first), targets, met, strict=True):
            judged = model == __file__
            assert (figure.target, figure.met) == ((target, each) if judged else ("", None))
            assert "[" in figure.value


@pytest.mark.parametrize(("cpu", "met"), [(1.005, True), (1.007, False)])
def test_the_cost_of_http_is_that_beyond_the_batcher(cpu: float, met: bool) -> None:
    """It is the difference of CPU times per token, in pairs."""
    plan = LoadPlan(
        ("0.3.9",), ("fits",), (4,), ("batcher", "serve"), rounds=load_figures.PAIRS,
        model=__file__,
    )  # fmt: skip
    timing = RequestTiming(0.0, 0.5, 1.0, 10)
    *_, http = load_figures.figures(
        {
            cell: LoadResult((timing,), cpu_seconds=cpu if cell.system == "serve" else 1.0)
            for cell in every(plan)
        }
    )
    assert http.name == "CPU per token of HTTP, serve without the batcher, 4 clients"
    assert http.value == f"{100 * (cpu - 1):.3f} ms [{100 * (cpu - 1):.3f}, {100 * (cpu - 1):.3f}]"
    assert http.met is met
