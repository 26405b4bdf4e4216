"""Measure two things alternately, so that drift of the machine affects both."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

#: Minimum number of pairs for a bound of a few percent.
MINIMUM_PAIRS = 30


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % confidence interval from a bootstrap of ``samples`` values."""

    median: float
    low: float
    high: float
    samples: int

    def format(self, digits: int = 2, unit: str = "") -> str:
        """Return ``1.23 [1.20, 1.27]`` with a unit; a single value has no interval.

        Further digits, at most five, show on which side of 1.0 a bound is.
        """
        end = f" {unit}" if unit else ""
        if self.samples == 1:
            return f"{self.median:.{digits}f}{end}"
        while digits < 5 and any(b != 1 and round(b, digits) == 1 for b in (self.low, self.high)):
            digits += 1
        return f"{self.median:.{digits}f}{end} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def interval(values: list[float], *, seed: int = 1) -> Interval:
    """Return the median of values and its percentile-bootstrap interval (Efron, 1979)."""
    if not values:
        msg = "there is nothing to take the median of"
        raise ValueError(msg)
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return Interval(statistics.median(values), medians[25], medians[974], len(values))


@dataclass(frozen=True)
class Pairs:
    """Interleaved measurements of two things, in seconds."""

    first: list[float]
    second: list[float]

    @property
    def ratio(self) -> Interval:
        """Return first over second, pair by pair."""
        return interval([a / b for a, b in zip(self.first, self.second, strict=True)])

    @property
    def difference(self) -> Interval:
        """Return first minus second, pair by pair, in seconds."""
        return interval([a - b for a, b in zip(self.first, self.second, strict=True)])


def clock(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleave(
    first: Callable[[], float],
    second: Callable[[], float],
    *,
    pairs: int = MINIMUM_PAIRS,
    progress: Callable[[], None] | None = None,
) -> Pairs:
    """Run two measurements alternately, with the order swapped each time; each returns seconds."""
    a: list[float] = []
    b: list[float] = []
    first()
    second()
    for index in range(pairs):
        if index % 2:
            b.append(second())
            a.append(first())
        else:
            a.append(first())
            b.append(second())
        if progress is not None:
            progress()
    return Pairs(a, b)
