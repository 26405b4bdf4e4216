"""Format the statistics of a cache: text, JSON and Prometheus exposition format.

These functions are pure. Their input is the statistics of cells, the counters of a context, and the
statistics of cache managers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Counters
    from pyllamakv.runtime.snapshot import SequenceStats

__all__ = [
    "CONTENT_TYPE", "PREFIX", "CellStats", "ManagerStats", "Metric", "aligned", "expose", "metrics",
    "prometheus", "rows", "text", "to_json",
]  # fmt: skip

#: Prefix of every metric name.
PREFIX = "pyllamakv"


class CellStats(Protocol):
    """The statistics of cells: a `KVStats`, or those of a trace."""

    @property
    def size(self) -> int:
        """Return the number of cells."""

    @property
    def used(self) -> int:
        """Return the used cells."""

    @property
    def free(self) -> int:
        """Return the free cells."""

    @property
    def shared(self) -> int:
        """Return the cells that more than one sequence uses."""

    @property
    def holes(self) -> int:
        """Return the runs of free cells."""

    @property
    def largest_hole(self) -> int:
        """Return the cells of the longest run of free cells."""

    @property
    def used_max_p1(self) -> int:
        """Return the highest used cell plus one."""

    @property
    def fragmentation(self) -> float:
        """Return the part of the free cells outside the largest hole."""

    @property
    def per_sequence(self) -> Mapping[int, SequenceStats]:
        """Return the numbers of each sequence."""

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""


class ManagerStats(Protocol):
    """The statistics of a cache manager: a flat object of numbers."""

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""


def metrics(
    stats: CellStats | None = None,
    counters: Counters | None = None,
    managers: Mapping[str, ManagerStats] | None = None,
) -> tuple[Metric, ...]:
    """Return the metrics of a cache; None values are omitted.

    ``managers`` maps names, which become the label ``manager``, to statistics. Counters are
    recognised by name, or by ``COUNTERS`` of the statistics; other numbers are gauges.
    """
    _check(stats, counters, managers)
    found = [] if stats is None else _of_cells(stats)
    if counters is not None:
        found += _of_counters(counters)
    return (*found, *_of_managers(managers or {}))


def prometheus(
    stats: CellStats | None = None,
    counters: Counters | None = None,
    managers: Mapping[str, ManagerStats] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
) -> str:
    """Return the metrics as Prometheus reads them; every sample gets ``labels`` as well.

    Raises UsageError for an invalid or reserved label.
    """
    return expose(metrics(stats, counters, managers), labels)


def to_json(
    stats: CellStats | None = None,
    counters: Counters | None = None,
    managers: Mapping[str, ManagerStats] | None = None,
) -> dict[str, Any]:
    """Return the same numbers as plain JSON values, under ``kv``, ``counters``, ``managers``."""
    _check(stats, counters, managers)
    found: dict[str, Any] = {}
    if stats is not None:
        found["kv"] = stats.to_json() | {"shared": stats.shared}
    if counters is not None:
        found["counters"] = {name: getattr(counters, name) for name in counters.__slots__}
    if managers:
        found["managers"] = {name: each.to_json() for name, each in managers.items()}
    return found


def text(
    stats: CellStats | None = None,
    counters: Counters | None = None,
    managers: Mapping[str, ManagerStats] | None = None,
) -> str:
    """Return the same numbers for people: a line for each, aligned."""
    return aligned(rows(stats, counters, managers))


def rows(
    stats: CellStats | None = None,
    counters: Counters | None = None,
    managers: Mapping[str, ManagerStats] | None = None,
) -> list[tuple[str, str]]:
    """Return names and values of the lines of `text`."""
    _check(stats, counters, managers)
    rows: list[tuple[str, str]] = []
    if stats is not None:
        rows += _about_cells(stats)
    if counters is not None:
        rows += _about_counters(counters)
    for name, each in (managers or {}).items():
        rows += [
            (" ".join([name, key.replace("_", " "), *labels.values()]), format_value(value))
            for key, labels, value in _numbers(each)
        ]  # fmt: skip
    return rows


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as lines, the values below each other."""
    rows = arguments.items("rows", rows, "pairs of text, (name, value)")
    for row in rows:
        pair = row if isinstance(row, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise arguments.wrong_type("an item of rows", row, "a pair of text, (name, value)")
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def _check(stats: object, counters: object, managers: object) -> None:
    """Raise unless the argument has the required numbers."""
    wanted = ("size", "used", "free", "shared", "holes", "largest_hole", "used_max_p1", "to_json")
    if stats is not None and not all(hasattr(stats, name) for name in wanted):
        raise arguments.wrong_type("stats", stats, "statistics of cells (kv.stats), or None")
    if counters is not None and not all(hasattr(counters, field) for field, *_ in _COUNTS):
        raise arguments.wrong_type("counters", counters, "counters (context.counters), or None")
    if managers is None:
        return
    expected = "a mapping of names to statistics of cache managers, or None"
    arguments.instance("managers", managers, Mapping, expected)  # type: ignore[type-abstract]
    assert isinstance(managers, Mapping)
    for name, each in managers.items():
        arguments.text("a name in managers", name)
        if not callable(getattr(each, "to_json", None)) or isinstance(each, type):
            shown = arguments.shown(name)
            raise arguments.wrong_type(f"managers[{shown}]", each, "a manager's statistics")


#: Name after `PREFIX`, help and value of each gauge of the cells.
_CELLS: tuple[tuple[str, str, Callable[[CellStats], float]], ...] = (
    ("kv_cells", "Cells of the KV cache; a cell holds one token.", lambda s: s.size),
    ("kv_cells_used", "Cells that hold a token of at least one sequence.", lambda s: s.used),
    ("kv_cells_free", "Cells that hold nothing.", lambda s: s.free),
    ("kv_cells_shared", "Cells that more than one sequence uses.", lambda s: s.shared),
    ("kv_cells_attended", "Cells up to the highest used one: attention runs so far.",
     lambda s: s.used_max_p1),
    ("kv_holes", "Runs of free cells.", lambda s: s.holes),
    ("kv_largest_hole_cells", "Cells of the longest run of free cells.", lambda s: s.largest_hole),
    ("kv_usage_ratio", "Used cells as a part of all, 0 to 1.",
     lambda s: s.used / s.size if s.size else 0.0),
    ("kv_fragmentation_ratio", "Free cells outside the largest hole as a part of all free ones.",
     lambda s: s.fragmentation),
)  # fmt: skip

#: Field of `Counters`, name after `PREFIX`, divisor for the unit, and help.
_COUNTS = (
    ("slot_searches", "kv_slot_searches_total", 1, "Searches for the cells of a micro-batch."),
    ("slot_failures", "kv_slot_failures_total", 1, "Searches that found no cells."),
    ("decode_retries", "kv_decode_retries_total", 1,
     "Decodes that defragmented after a failed search and searched again."),
    ("defrags", "kv_defragmentations_total", 1, "Defragmentations that were done."),
    ("moves", "kv_defragmentation_moves_total", 1, "Runs of cells that they moved."),
    ("cells_moved", "kv_defragmentation_cells_total", 1, "Cells that they moved."),
    ("bytes_moved", "kv_defragmentation_bytes_total", 1, "Bytes of K and V that they moved."),
    ("graphs", "kv_defragmentation_graphs_total", 1, "Graphs that they launched."),
    ("ns", "kv_defragmentation_seconds_total", 1e9, "Time that they took."),
    ("plan_ns", "kv_defragmentation_plan_seconds_total", 1e9,
     "Part of that time in which they found out what moves where."),
)  # fmt: skip


#: Counters of cache managers; their other numbers are gauges.
COUNTER_FIELDS = frozenset(
    {
        *("prompts", "hits", "misses", "prompt_tokens", "reused_tokens"),
        *("forks", "evictions", "shifts", "reprocessed", "refused"),
        *("paged_out", "paged_in", "damaged", "stored_tokens", "loaded_tokens"),
        *("decodes", "decoded_tokens", "generated_tokens", "slot_failures"),
        *("evaluated_tokens", "evicted_tokens", "paged_out_tokens", "paged_in_tokens"),
        *("parks", "resumes", "parked_tokens", "resumed_tokens", "state_evictions"),
        "hits_by_depth",
        *("finished", "cancelled", "failed"),
        *("forwards", "full_errors", "defrags", "copies", "removals", "restores"),
    }
)


def _of_cells(stats: CellStats) -> list[Metric]:
    found = [
        Metric(f"{PREFIX}_{name}", "gauge", said, (({}, value(stats)),))
        for name, said, value in _CELLS
    ]
    sequences = tuple(
        ({"sequence": str(number)}, each.cells) for number, each in stats.per_sequence.items()
    )
    if sequences:
        name = f"{PREFIX}_kv_sequence_cells"
        found.append(Metric(name, "gauge", "Cells that a sequence uses, shared or not.", sequences))
    return found


def _of_counters(counters: Counters) -> list[Metric]:
    found = [
        Metric(f"{PREFIX}_{name}", "counter", said, (({}, _scaled(counters, field, unit)),))
        for field, name, unit, said in _COUNTS
        if getattr(counters, field) >= 0
    ]
    if counters.scratch_bytes < 0:
        return found
    name = f"{PREFIX}_kv_defragmentation_scratch_bytes"
    said = "Most bytes beside the cache that any defragmentation needed."
    return [*found, Metric(name, "gauge", said, (({}, counters.scratch_bytes),))]


def _of_managers(managers: Mapping[str, ManagerStats]) -> list[Metric]:
    """Group the values of several managers by name, as the Prometheus format requires."""
    samples: dict[tuple[str, bool], list[tuple[Mapping[str, str], float]]] = {}
    for manager, stats in managers.items():
        counted = getattr(stats, "COUNTERS", COUNTER_FIELDS)
        for key, labels, value in _numbers(stats):
            place = samples.setdefault((key, key in counted), [])
            place.append(({"manager": manager, **labels}, value))
    found = []
    for (key, counts), each in samples.items():
        name = f"{PREFIX}_cache_{key}" + ("_total" if counts else "")
        said = f"{key.replace('_', ' ').capitalize()} of a cache manager."
        found.append(Metric(name, "counter" if counts else "gauge", said, tuple(each)))
    return found


def _numbers(stats: ManagerStats) -> list[tuple[str, dict[str, str], float]]:
    """Return name, labels and value of the numeric fields of a manager's statistics.

    A field ``…_by_LABEL`` is a mapping of values of the label to numbers. None is omitted.
    """
    found: list[tuple[str, dict[str, str], float]] = []
    for key, value in stats.to_json().items():
        if isinstance(value, int | float):
            found.append((key, {}, value))
        elif isinstance(value, Mapping) and "_by_" in key:
            label = key.rpartition("_by_")[2]
            found += [(key, {label: str(name)}, number) for name, number in value.items()]
    return found


def _about_cells(stats: CellStats) -> list[tuple[str, str]]:
    percent = f" ({stats.used / stats.size:.0%})" if stats.size else ""
    rows = [
        ("cells", str(stats.size)),
        ("used", f"{stats.used}{percent}"),
        ("free", str(stats.free)),
        ("holes", f"{stats.holes}, the largest of {_cells(stats.largest_hole)}"),
        ("fragmentation", f"{stats.fragmentation:.1%} of the free cells outside it"),
        ("attended", f"{_cells(stats.used_max_p1)}, up to the highest used one"),
        ("shared", str(stats.shared)),
    ]
    for number, each in stats.per_sequence.items():
        spans = f"{each.spans} spans" if each.spans != 1 else "1 span"
        said = f"{_cells(each.cells)} in {spans}"
        if each.pos_max >= 0:
            said += f", positions {each.pos_min} to {each.pos_max}"
        rows.append((f"sequence {number}", said))
    return rows


def _about_counters(counters: Counters) -> list[tuple[str, str]]:
    rows = [
        (
            "slot searches",
            f"{counters.slot_searches}, {counters.slot_failures} without success",
            counters.slot_searches,
        ),
        ("decode retries", str(counters.decode_retries), counters.decode_retries),
        (
            "defragmentations",
            f"{counters.defrags}: {counters.cells_moved} cells, {counters.bytes_moved} bytes in "
            f"{counters.moves} moves, {counters.ns / 1e6:.3f} ms",
            counters.defrags,
        ),
    ]
    return [(name, text) for name, text, value in rows if value >= 0]


def _cells(n: int) -> str:
    return f"{n} cells" if n != 1 else "1 cell"


def _scaled(counters: Counters, field: str, unit: float) -> float:
    value: int = getattr(counters, field)
    return value if unit == 1 else value / unit


#: The content type of the exposition for an HTTP server.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Labels that the metrics set themselves.
RESERVED_LABELS = ("sequence", "manager")

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Metric:
    """One metric: name, kind, help, and (labels, value) of each sample."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


def expose(found: Iterable[Metric], labels: Mapping[str, str] | None = None) -> str:
    """Return any metrics as Prometheus reads them; raises UsageError as `prometheus` does."""
    found = tuple(arguments.items("found", found, "metrics"))
    for metric in found:
        arguments.instance("an item of found", metric, Metric, "a Metric")
    if labels is not None:
        expected = "a mapping of labels to text, or None"
        arguments.instance("labels", labels, Mapping, expected)  # type: ignore[type-abstract]
        for label, text in labels.items():
            arguments.text("a label", label)
            arguments.text(f"labels[{arguments.shown(label)}]", text)
    check(labels or {}, [key for one in found for own, _ in one.samples for key in own])
    lines = []
    for metric in found:
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for own, value in metric.samples:
            pairs = ",".join(
                f'{key}="{_escape(str(each), quote=True)}"'
                for key, each in {**(labels or {}), **own}.items()
            )
            lines.append(f"{metric.name}{f'{{{pairs}}}' if pairs else ''} {format_value(value)}")
    return "".join(line + "\n" for line in lines)


def check(labels: Iterable[str], own: Iterable[str] = ()) -> None:
    """Raise UsageError for an invalid label, or one that a metric sets itself."""
    ours = {*RESERVED_LABELS, *own}
    for label in labels:
        if not _LABEL.fullmatch(label) or label.startswith("__") or label in ours:
            msg = (
                f"{label!r} cannot be a label: expected letters, digits and _, not beginning with "
                f"a digit or __, and none of {', '.join(sorted(ours))}"
            )
            raise UsageError(msg)


def format_value(value: float) -> str:
    """Return a number as Prometheus reads it, whole ones without a point."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escape(said: str, *, quote: bool = False) -> str:
    said = said.replace("\\", "\\\\").replace("\n", "\\n")
    return said.replace('"', '\\"') if quote else said
