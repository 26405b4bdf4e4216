"""Count the cases of one release, and create its result."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations as pairs_of
from typing import TYPE_CHECKING

from qa.entry import Entry, strip_directories
from qa.random_operations.combination import Combination
from qa.random_operations.task import Played

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

#: Identity of a failure: its class, and its message without numbers.
Kind = tuple[str, str]

#: Cases without a backing before it counts as never used: each may have met a memory that cannot be
#: kept.
_OFTEN = 5


@dataclass
class CaseCounts:
    """Counts of cases, combinations, and results of operations.

    ``kinds`` counts failures of a kind, and ``first_messages`` has the first message of each kind.
    ``absent`` counts the reasons why a memory or a cache was not available. ``faint`` has the first
    combination of each failure of a device at a first batch, ``lacking`` that of the other
    failures, with each cache and memory. ``missing`` counts the backings and devices of these.
    """

    played: Played = field(default_factory=Played)
    cases: int = 0
    combinations: Counter[Combination] = field(default_factory=Counter)
    kinds: Counter[Kind] = field(default_factory=Counter)
    first_messages: dict[Kind, str] = field(default_factory=dict)
    absent: Counter[str] = field(default_factory=Counter)
    faint: dict[str, Combination] = field(default_factory=dict)
    lacking: dict[tuple[str, str, str], Combination] = field(default_factory=dict)
    missing: Counter[str] = field(default_factory=Counter)

    def add(self, combination: Combination, played: Played) -> None:
        """Count a case, unless its objects are not available."""
        if played.absent:
            why = strip_directories(played.absent)
            self.absent[why] += 1
            if played.device_failed:
                self.faint.setdefault(why, combination)
            else:
                key = why, combination.cache, combination.memory
                self.lacking.setdefault(key, combination)
                self.missing.update({combination.backing, combination.device, combination.streams})
            return
        self.played.add(played)
        self.cases += 1
        self.combinations[combination] += 1

    @property
    def operations(self) -> int:
        """Count all operations."""
        return self.played.done.total()

    @property
    def values(self) -> dict[str, dict[str, int]]:
        """Count the cases with each value of each dimension."""
        found: dict[str, Counter[str]] = {each.name: Counter() for each in fields(Combination)}
        for each, times in self.combinations.items():
            for name, value in asdict(each).items():
                found[name][value] += times
        return {name: dict(sorted(counts.items())) for name, counts in found.items()}

    @property
    def pairs(self) -> int:
        """Count the pairs of values of two dimensions in the tested combinations."""
        met = (pairs_of(asdict(each).items(), 2) for each in self.combinations)
        return len({pair for pairs in met for pair in pairs})

    def never(self, can: Collection[str]) -> Iterator[str]:
        """Yield a defect for each supported backing, device and stream that was never used."""
        played = {*self.values["backing"], *self.values["device"], *self.values["streams"]}
        for value, times in self.missing.items():
            if value in can and value not in played and times >= _OFTEN:
                yield f"{value} is supported, but was never tested: unavailable {times} times"

    def entry(self, name: str, seed: int, seconds: float, more: Iterable[str] = ()) -> Entry:
        """Return the line of a release; ``more`` are defects without a failing case."""
        played = self.played
        row = {
            "operations": f"{self.operations:,}",
            "schedules": f"{self.cases:,}",
            "combinations": f"{len(self.combinations):,}",
            "a second": f"{self.operations / max(seconds, 1e-9):.0f}",
            "decodes without cells": f"{played.ended['no-slot']:,}",
            "cancelled": f"{played.ended['aborted']:,}",
            "K and V compared": f"{played.compared:,}",
            "keys turned": f"{played.shifts_checked:,}",
            "logits compared": f"{played.logits:,}",
            "absent": f"{self.absent.total():,}",
            "seed": str(seed),
        }
        data = {
            "seconds": round(seconds, 1),
            "operations": dict(played.done.most_common()),
            "ended": dict(played.ended),
            "exact": played.exact,
            "pairs": self.pairs,
            "values": self.values,
            "failures": {" ".join(kind): times for kind, times in self.kinds.items()},
            "absent": dict(self.absent),
        }
        return Entry("random_operations", name, row, (*self._defects(), *more), seed, data)

    def _defects(self) -> Iterator[str]:
        if not self.operations:
            why = "; ".join(self.absent)
            yield f"nothing was tested{': ' if why else ''}{why}"
        for kind, text in self.first_messages.items():
            times = self.kinds[kind]
            yield text if times == 1 else f"{text} ({times} times)"
