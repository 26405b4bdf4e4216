"""The benchmarks' arithmetic and their document; never a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qa.bench import benchmark_document, measure
from qa.bench.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path


def test_interval_holds_the_median_and_says_how_sure_it_is() -> None:
    """The bounds enclose the median, and meet it where all values are equal."""
    found = measure.interval([float(n) for n in range(101)])
    assert found.low <= found.median == 50 <= found.high
    assert found.high - found.low < 60
    same = measure.interval([2.0] * 40)
    assert (same.low, same.median, same.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="nothing"):
        measure.interval([])


def test_interleave_runs_both_equally_often_and_swaps_the_order() -> None:
    """Neither side is always first, so that neither pays for the other's caches."""
    order: list[str] = []

    def first() -> float:
        order.append("a")
        return 2.0

    def second() -> float:
        order.append("b")
        return 1.0

    pairs = measure.interleave(first, second, pairs=4)
    assert order[2:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert pairs.ratio.median == 2.0
    assert pairs.difference.median == 1.0


def test_document_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    """A second run replaces its own groups and leaves the others."""
    path = tmp_path / "BENCHMARKS.md"
    one = Figure("Cost", "a", "1 s", "2 s", met=True)
    benchmark_document.write(path, [one, Figure("Size", "b", "5 MB")])
    benchmark_document.write(path, [Figure("Cost", "a", "3 s", "2 s", met=False)])
    text = path.read_text(encoding="utf-8")
    assert "| a | 3 s | 2 s | **missed** |" in text
    assert "| b | 5 MB |" in text
    assert "1 s" not in text.split("## Cost")[1]
    assert [figure.name for figure in benchmark_document.read(path)] == ["a", "b"]


def test_tables_of_another_run_name_it() -> None:
    """Rows of two commands are not shown as those of one."""
    rows = [
        Figure("Load", name, "", table="Requests.", row={"system": name}, measured=f"by {command}")
        for name, command in (("stock", "one"), ("patched", "one"), ("batcher", "two"))
    ]
    text = benchmark_document.render(rows)
    assert "Measured by one.\n\nRequests.\n" in text
    assert "| stock |\n| patched |\n\nRequests. Measured by two.\n\n" in text
    assert text.endswith("| batcher |\n")


def test_rounding_keeps_significant_digits() -> None:
    """Small and large numbers keep three digits."""
    assert measure.rounded(0.0012345) == 0.00123
    assert measure.rounded(123456.0) == 123000.0
    assert measure.rounded(0.0) == 0.0


def test_samples_are_summarized(tmp_path: Path) -> None:
    """A list of samples becomes its number, quartiles and extremes; other values stay."""
    path = tmp_path / "BENCHMARKS.md"
    data = {"times": [5.0, 1.0, 2.0, 3.0, 4.0], "lost": 0, "pair": [1, 2], "names": ["a"] * 9}
    benchmark_document.write(path, [Figure("Loop", "greedy", "1 x", data={"run": data})])
    (kept,) = benchmark_document.read(path)
    times = {"n": 5, "quartiles": [1.5, 3.0, 4.5], "min": 1.0, "max": 5.0}
    assert kept.data == {"run": data | {"times": times}}
    benchmark_document.write(path, [])
    assert benchmark_document.read(path) == [kept]
