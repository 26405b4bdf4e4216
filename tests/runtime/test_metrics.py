"""Test that metrics are exact, complete and in the format of Prometheus."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_kit import parse

from pyllamakv.binding.protocol import Counters
from pyllamakv.cache.batcher import BatcherStats
from pyllamakv.cache.context_cache import ContextCacheStats
from pyllamakv.cache.prefix_cache import PrefixStats
from pyllamakv.cache.slot_cache import SlotStats
from pyllamakv.errors import UsageError
from pyllamakv.runtime import metrics
from pyllamakv.runtime.snapshot import CellMap, KVStats, Snapshot


def stats() -> KVStats:
    """Return the statistics of eight cells: two sequences that share one, and two holes."""
    pos = np.array([0, 1, -1, 2, -1, -1, 5, -1], dtype=np.int32)
    seqs = np.array([[1], [3], [0], [2], [0], [0], [1], [0]], dtype=np.uint64)
    return Snapshot((CellMap(pos, np.zeros(8, dtype=np.int32), seqs),)).stats


@dataclass(frozen=True)
class Told:
    """Replace the statistics of a cache manager."""

    COUNTERS: ClassVar[tuple[str, ...]] = ("hits",)

    hits: int = 3
    entries: int = 2
    ratio: float = 0.5
    policy: str = "longest"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def test_cell_statistics_have_a_gauge_each() -> None:
    """Each gauge has the value of the statistics, each sequence its sample."""
    kinds, samples = parse(metrics.prometheus(stats()))
    values = {name: value for (name, labels), value in samples.items() if not labels}
    assert values == {
        "pyllamakv_kv_cells": 8,
        "pyllamakv_kv_cells_used": 4,
        "pyllamakv_kv_cells_free": 4,
        "pyllamakv_kv_cells_shared": 1,
        "pyllamakv_kv_cells_attended": 7,
        "pyllamakv_kv_holes": 3,
        "pyllamakv_kv_largest_hole_cells": 2,
        "pyllamakv_kv_usage_ratio": 0.5,
        "pyllamakv_kv_fragmentation_ratio": 0.5,
    }
    assert samples["pyllamakv_kv_sequence_cells", (("sequence", "0"),)] == 3
    assert samples["pyllamakv_kv_sequence_cells", (("sequence", "1"),)] == 2
    assert set(kinds.values()) == {"gauge"}


def test_library_counters_have_a_metric_each() -> None:
    """No field of the counters is omitted; times are in seconds, the only changed unit."""
    fields = {name: number for number, name in enumerate(Counters.__slots__, start=2)}
    kinds, samples = parse(metrics.prometheus(counters=Counters(**fields)))
    assert len(samples) == len(fields)
    values = {name: value for (name, _), value in samples.items()}
    assert values["pyllamakv_kv_slot_searches_total"] == fields["slot_searches"]
    assert values["pyllamakv_kv_defragmentation_seconds_total"] == fields["ns"] / 1e9
    assert kinds["pyllamakv_kv_defragmentation_scratch_bytes"] == "gauge"
    assert sum(kind == "counter" for kind in kinds.values()) == len(fields) - 1


def test_managers_share_a_metric_and_keep_their_names() -> None:
    """Several managers have labels of one metric; counters end in _total."""
    kinds, samples = parse(metrics.prometheus(managers={"a": Told(), "b": Told(hits=9)}))
    assert samples["pyllamakv_cache_hits_total", (("manager", "b"),)] == 9
    assert samples["pyllamakv_cache_ratio", (("manager", "a"),)] == 0.5
    assert set(kinds) == {
        "pyllamakv_cache_hits_total",
        "pyllamakv_cache_entries",
        "pyllamakv_cache_ratio",
    }


LEVELS = {
    *("slots", "in_use", "size", "tokens", "waiting", "active", "checkpoints", "checkpoint_bytes"),
    *("resident", "paged", "leased", "pinned", "nodes", "cells", "budget_bytes"),
    *("resident_bytes", "paged_bytes", "bytes", "stored_pages", "stored_bytes"),
    *("parked", "states", "bytes_by_tier", "digest_bytes"),
}


@pytest.mark.parametrize("found", [SlotStats, PrefixStats, BatcherStats, ContextCacheStats])
def test_each_number_of_managers_is_a_counter_or_a_level(found: type) -> None:
    """A new number must be declared as one or the other."""
    names = {each.name for each in fields(found)}
    assert not metrics.COUNTER_FIELDS & LEVELS
    assert names <= metrics.COUNTER_FIELDS | LEVELS


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True), st.text(), max_size=3))
def test_escaped_labels_are_parsed_unchanged(labels: dict[str, str]) -> None:
    """Quotes, backslashes, newlines and any other character survive."""
    if {"sequence", "manager"} & labels.keys():
        return
    # str.splitlines splits at more than newlines; a scraper reads lines that end with \n.
    labels = {key: "".join(value.splitlines()) + "\n" for key, value in labels.items()}
    _, samples = parse(metrics.prometheus(stats(), labels=labels))
    assert all(dict(found).items() >= labels.items() for _, found in samples)


@pytest.mark.parametrize("label", ["", "0a", "a-b", "__name__", "sequence", "manager", "é"])
def test_invalid_labels_are_refused(label: str) -> None:
    """They are before anything is written, with a valid example."""
    with pytest.raises(UsageError, match="cannot be a label"):
        metrics.prometheus(stats(), labels={label: "x"})


def test_infinity_and_nan_are_written_as_in_prometheus() -> None:
    """They are spelled like in Prometheus."""
    each = [math.nan, math.inf, -math.inf, 1.0, 3, 10**20, True]
    found = metrics.Metric("a", "gauge", "b", tuple(({"i": str(i)}, v) for i, v in enumerate(each)))
    lines = metrics.expose([found]).splitlines()[2:]
    output = [line.split(" ")[1] for line in lines]
    assert output == ["NaN", "+Inf", "-Inf", "1.0", "3", "1" + "0" * 20, "1"]


def test_build_without_counters_exposes_no_metrics() -> None:
    """The output is empty, without zeros."""
    assert metrics.prometheus() == metrics.text() == ""
    assert metrics.to_json() == {}


def test_text_and_json_have_the_same_numbers() -> None:
    """Both formats have the numbers of the metrics."""
    output = metrics.text(stats(), Counters(slot_searches=7), {"slots": Told()})
    assert "used           " in output or "used  " in output
    assert "sequence 1" in output and "7, 0 without success" in output and "slots hits" in output
    raw = metrics.to_json(stats(), Counters(slot_searches=7), {"slots": Told()})
    assert raw["kv"]["used"] == 4 and raw["kv"]["shared"] == 1
    assert raw["counters"]["slot_searches"] == 7
    assert raw["managers"]["slots"]["policy"] == "longest"


def test_the_client_library_reads_it() -> None:
    """Prometheus' own parser finds the same samples, if it is installed."""
    parser = pytest.importorskip("prometheus_client.parser")
    output = metrics.prometheus(stats(), Counters(), {"a": Told()}, labels={"model": 'a"b\\c\nd'})
    families = list(parser.text_string_to_metric_families(output))
    found = [sample for family in families for sample in family.samples]
    assert len(found) == len(parse(output)[1])
    assert all(sample.labels["model"] == 'a"b\\c\nd' for sample in found)


def test_counters_of_minus_one_are_not_exposed() -> None:
    """A counter of -1 is no measurement, also in a difference."""
    fields = dict.fromkeys(Counters.__slots__, -1) | {"slot_searches": 7}
    counters = Counters(**fields)
    kinds, samples = parse(metrics.prometheus(counters=counters))
    assert [*kinds] == ["pyllamakv_kv_slot_searches_total"], samples
    assert "defragmentations" not in metrics.text(stats(), counters)
    assert "slot searches" in metrics.text(stats(), counters)
    since = counters - Counters(**fields | {"slot_searches": 5})
    assert (since.slot_searches, since.defrags, since.scratch_bytes) == (2, -1, -1)
