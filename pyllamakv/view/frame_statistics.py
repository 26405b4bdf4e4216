"""The statistics of a run as metrics: final cells, and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyllamakv.runtime.metrics import PREFIX, Metric
from pyllamakv.runtime.snapshot import SequenceStats
from pyllamakv.scenarios.cell_picture import FREE, SHARED

if TYPE_CHECKING:
    from pyllamakv.scenarios.cell_picture import Picture
    from pyllamakv.scenarios.frames import Timeline


@dataclass(frozen=True)
class PictureStats:
    """Count the cells of a picture, like `KVStats` for a snapshot.

    A picture shows that a cell is shared, but not its sequences, so there are no numbers per
    sequence.
    """

    picture: Picture

    @property
    def size(self) -> int:
        """Return the number of cells."""
        return len(self.picture.owner)

    @property
    def used(self) -> int:
        """Return the number of used cells."""
        return self.picture.used

    @property
    def free(self) -> int:
        """Return the number of free cells."""
        return self.size - self.used

    @property
    def shared(self) -> int:
        """Return the number of cells that more than one sequence uses."""
        return self.picture.owner.count(SHARED)

    @property
    def holes(self) -> int:
        """Return the number of runs of free cells."""
        return self.picture.holes[0]

    @property
    def largest_hole(self) -> int:
        """Return the cells of the longest run of free cells."""
        return self.picture.holes[1]

    @property
    def used_max_p1(self) -> int:
        """Return the highest used cell plus one, summed over streams."""
        edges = (0, *self.picture.starts, self.size)
        found = 0
        for start, end in pairwise(edges):
            used = [n for n, owner in enumerate(self.picture.owner[start:end]) if owner != FREE]
            found += used[-1] + 1 if used else 0
        return found

    @property
    def fragmentation(self) -> float:
        """Return the share of free cells outside of the largest hole, 0 to 1."""
        return 1.0 - self.largest_hole / self.free if self.free else 0.0

    @cached_property
    def per_sequence(self) -> Mapping[int, SequenceStats]:
        """Return cells and spans of every sequence; positions are not known, and -1."""
        if self.shared:
            return {}
        cells: Counter[int] = Counter(self.picture.owner)
        spans: Counter[int] = Counter(owner for owner, _ in self.picture.runs())
        return {
            owner: SequenceStats(cells[owner], -1, -1, spans[owner], 0)
            for owner in sorted(cells)
            if owner != FREE
        }

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        names = ("size", "used", "free", "holes", "largest_hole", "used_max_p1")
        per_sequence = {str(owner): each.cells for owner, each in self.per_sequence.items()}
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {
            **facts,
            "fragmentation": round(self.fragmentation, 6),
            "per_sequence": per_sequence,
        }


#: Labels of the metrics of a run.
LABELS = ("op", "failure")


def timeline_metrics(timeline: Timeline) -> tuple[Metric, ...]:
    """Return the statistics of operations: counts, failures and moved cells."""
    deeds = timeline.operations()
    operations = Counter(frame.op for frame in deeds)
    failures = Counter((frame.op, frame.failed) for frame in deeds if frame.failed)
    found = [
        Metric(
            f"{PREFIX}_run_operations_total",
            "counter",
            "Operations of a run.",
            tuple(({"op": op}, n) for op, n in sorted(operations.items())),
        ),
        Metric(
            f"{PREFIX}_run_failures_total",
            "counter",
            "Operations that failed, and how.",
            tuple(
                ({"op": op, "failure": failed}, n)
                for (op, failed), n in sorted(failures.items())
            ),
        ),
        Metric(
            f"{PREFIX}_run_cells_moved_total",
            "counter",
            "Cells that an operation moved.",
            (({}, sum(frame.moved for frame in deeds)),),
        ),
    ]  # fmt: skip
    return tuple(metric for metric in found if metric.samples)


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Return the same as plain JSON values."""
    deeds = timeline.operations()
    failures = Counter(f"{frame.op}: {frame.failed}" for frame in deeds if frame.failed)
    return {
        "operations": dict(sorted(Counter(frame.op for frame in deeds).items())),
        "failures": dict(sorted(failures.items())),
        "cells_moved": sum(frame.moved for frame in deeds),
    }


def rows(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the same for people, as lines of `metrics.text`."""
    raw = to_json(timeline)
    return [
        ("operations", ", ".join(f"{n} {op}" for op, n in raw["operations"].items()) or "none"),
        ("failures", ", ".join(f"{n} {what}" for what, n in raw["failures"].items()) or "none"),
        ("cells moved", str(raw["cells_moved"])),
    ]
