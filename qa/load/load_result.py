"""What a load test measured: the times of each request, and what the server used."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np

#: Gaps between tokens that are kept of a request.
GAPS: Final = 4


@dataclass(frozen=True)
class RequestTiming:
    """A request: seconds from the start of the run until arrival, first token and end.

    ``error`` is the reason why it was lost: refused, cut off or without an answer. ``gaps`` are the
    longest times without a token of a server, at most `GAPS`, as beginning and end.
    """

    arrived: float
    first: float
    ended: float
    tokens: int
    error: str = ""
    gaps: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class LoadResult:
    """The requests of a run in the order of arrival.

    ``cpu_seconds`` are those of the server process, or of the process with the batcher, including
    its start. ``retries`` counts batches that found no cells and were split. ``deaths`` are the
    times at which the server ended or was ended because it did not answer, in seconds from the
    start, with the reason. ``day`` is the date of the run, YYYY-MM-DD in UTC.
    """

    timings: tuple[RequestTiming, ...]
    cpu_seconds: float
    retries: int = 0
    deaths: tuple[tuple[float, str], ...] = ()
    day: str = ""

    @property
    def lost(self) -> int:
        """Return how many requests were not answered completely."""
        return sum(bool(each.error) for each in self.timings)

    @property
    def seconds(self) -> float:
        """Return the time until the last request ended."""
        return max((each.ended for each in self.timings), default=0.0)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in complete answers."""
        return sum(each.tokens for each in self._answered)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of complete answers per second of the run."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def cpu_per_token(self) -> float:
        """Return the CPU seconds per token of a complete answer, with the work on its prompt.

        Not a number without one.
        """
        return self.cpu_seconds / self.tokens if self.tokens else float("nan")

    @property
    def first_token(self) -> tuple[float, ...]:
        """Return the seconds from arrival to the first token of each complete answer."""
        return tuple(each.first - each.arrived for each in self._answered)

    @property
    def durations(self) -> tuple[float, ...]:
        """Return the seconds from arrival to the end of each complete answer."""
        return tuple(each.ended - each.arrived for each in self._answered)

    @property
    def per_token(self) -> tuple[float, ...]:
        """Return the seconds per token after the first one, of each answer with at least two."""
        return tuple(
            (each.ended - each.first) / (each.tokens - 1)
            for each in self._answered
            if each.tokens > 1
        )

    @property
    def _answered(self) -> list[RequestTiming]:
        return [each for each in self.timings if not each.error]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """Return the result that `to_json` wrote. Raises KeyError, TypeError or ValueError."""
        return cls(
            tuple(_timing(each) for each in raw["timings"]),
            float(raw["cpu_seconds"]),
            int(raw["retries"]),
            tuple((float(at), str(why)) for at, why in raw["deaths"]),
            str(raw["day"]),
        )


def _timing(raw: dict[str, Any]) -> RequestTiming:
    gaps = tuple((float(begin), float(end)) for begin, end in raw.get("gaps", ()))
    return RequestTiming(**{**raw, "gaps": gaps})


def percentiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Return the 50th, 95th and 99th percentile, interpolated; not a number without values."""
    if not values:
        return (float("nan"),) * 3
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return float(p50), float(p95), float(p99)
