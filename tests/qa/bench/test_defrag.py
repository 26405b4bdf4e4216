"""Test the benchmarks of defragmentation: workloads and arithmetic, but no times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import pyllamakv
from pyllamakv.errors import Untestable
from pyllamakv.runtime.snapshot import Moves
from pyllamakv.scenarios.architectures import Shape
from qa.bench import (
    c_library,
    contexts,
    defrag,
    defrag_figures,
    defrag_workloads,
    memory_bandwidth,
    rounds,
)
from qa.bench.defrag_workloads import PATTERNS, SETTINGS, CacheShape
from qa.bench.rounds import Measured

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from pyllamakv.runtime.kv import DefragReport

FLASH, NONE, Q8, Q4 = SETTINGS
GROUP = "A group"


def measured(cache: CacheShape, pattern: str = "alternate", **changes: object) -> Measured:
    """Return a workload: twice the time of the strided copy, a quarter of the published one."""
    found = Measured(cache, pattern, bytes=4_000_000)
    found = replace(
        found, ours=[2.0] * 6, strided=[1.0] * 6, straight=[0.5] * 6, published=[8.0] * 5
    )
    return replace(found, plan=[0.03] * 6, **changes)  # type: ignore[arg-type]


def test_bytes_are_those_of_the_shapes() -> None:
    """A billion parameters keep 32 KiB a cell in f16, eight billion 128."""
    assert CacheShape("1B", FLASH, 4096).cell == 32768
    assert CacheShape("8B", NONE, 4096).cell == 131072
    assert CacheShape("1B", Q8, 4096).row == 512 // 32 * 34
    assert CacheShape("8B", Q4, 65536).bytes == 65536 * 2 * 32 * (1024 // 32 * 18)


def test_cache_larger_than_memory_has_a_reason() -> None:
    """Cache and buffer must fit at the same time; without a known limit, the run is attempted."""
    cache = CacheShape("8B", FLASH, 131072)
    assert cache.skipped(9_000_000_000) == "skipped: needs 54 GB, 9 GB there"
    assert cache.skipped(3 * cache.bytes + defrag_workloads.BESIDE) == ""
    assert cache.skipped(None) == ""


@pytest.mark.parametrize(
    ("pattern", "share"),
    list(zip(PATTERNS, (0.5, 0.1, 0.5, 0.9, 0.5), strict=True)),
)
def test_patterns_keep_the_named_share_of_cells(pattern: str, share: float) -> None:
    """The same cells are used each time, in about the number of the name."""
    mask = defrag_workloads.live(pattern, 4096)
    assert np.array_equal(mask, defrag_workloads.live(pattern, 4096))
    assert abs(mask.mean() - share) < 0.03
    if pattern == "runs of 16":
        assert mask[:16].all() and not mask[16:32].any()


def test_table_joins_neighbours() -> None:
    """Cells that stay adjacent are one move."""
    source, target = np.array([4, 5, 7, 8]), np.array([0, 1, 2, 3])
    found = memory_bandwidth.table(Moves(np.zeros(4, dtype=np.int64), source, target))
    assert found.tolist() == [[4, 0, 2], [7, 2, 2]]
    empty = np.empty(0, dtype=np.int64)
    assert memory_bandwidth.table(Moves(empty, empty, empty)).shape == (0, 3)


def test_ratios_pair_the_rounds_of_both_algorithms() -> None:
    """The published algorithm may have fewer rounds, which are paired with the first ones."""
    found = measured(CacheShape("1B", FLASH, 4096))
    assert found.over_strided.median == 2.0
    assert found.over_straight.median == 4.0
    assert found.faster.median == 4.0


def test_targets_are_judged_by_the_worst() -> None:
    """Each target has the worst workload, and is met or missed."""
    good = measured(CacheShape("1B", FLASH, 16384), strided=[1.9] * 6, published=[50.0] * 5)
    bad = measured(CacheShape("1B", FLASH, 65536))
    none = measured(CacheShape("1B", NONE, 16384))
    gone = Measured(
        CacheShape("8B", FLASH, 131072), "alternate", "skipped: needs 37 GB, 9 GB there"
    )
    by_name = {each.name: each for each in defrag_figures.targets(GROUP, [good, bad, none, gone])}
    strided = by_name["with flash attention, alternate cells, over a strided copy of the same rows"]
    assert strided.met is False and "65536 cells" in strided.value
    memcpy = by_name["no flash attention, alternate cells, over memcpy of the same bytes"]
    assert memcpy.met is False and memcpy.value.startswith("4.00 [4.00, 4.00] x")
    assert by_name["every workload: the published algorithm over the patch"].met is True
    assert by_name["the plan, as a fraction of the defragmentation"].value.startswith("1.5%")
    assert defrag_figures.targets(GROUP, [gone]) == []


def test_a_missing_build_is_reported_and_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later release is measured even if the default one cannot be."""

    def measure(*_: object, **__: object) -> list[Measured]:
        msg = "not built"
        raise Untestable(msg)

    monkeypatch.setattr(contexts, "measure", measure)
    (figure,) = defrag.later(lambda: None, "9.9.9")
    assert figure.value == "skipped: not built"
    assert figure.group.endswith("9.9.9")


def test_a_comparison_without_a_compiler_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The comparison needs a compiler."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(Untestable, match="install gcc or clang"):
        c_library.load("limits.c", tmp_path)


@pytest.mark.native
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.name)
def test_a_small_grid_is_measured(
    patched: Variant, monkeypatch: pytest.MonkeyPatch, setting: defrag_workloads.CacheTypes
) -> None:
    """All patterns of a cache of 256 cells; only the published algorithm computes graphs."""
    small = Shape("kv-small", n_layer=2, n_head=2, n_head_kv=2, head=32, n_ctx=1024)
    monkeypatch.setitem(defrag_workloads.SHAPES, "1B", small)
    cache = CacheShape("1B", setting, 256)
    complete, graphs = rounds.complete, Counter[str]()

    def counted(context: pyllamakv.Context, mask: defrag_workloads.Live) -> DefragReport:
        report = complete(context, mask)
        graphs[context.info.defrag_mover.name] += report.graphs or 0
        return report

    monkeypatch.setattr(rounds, "complete", counted)
    found = contexts.measure([(cache, PATTERNS)], lambda: None, spec="0.3.9+patched", budget=0.0)
    assert graphs["GRAPH"] >= 5 * len(PATTERNS)
    assert graphs["AUTO"] == 0
    assert [each.pattern for each in found] == list(PATTERNS)
    for each in found:
        assert len(each.ours) == len(each.strided) == len(each.plan) >= len(each.published) == 5
        assert each.bytes % cache.cell == 0
    assert len(defrag_figures.targets(GROUP, found)) >= 5


@pytest.mark.native
def test_cache_larger_than_memory_opens_no_context(
    patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is in its place, and no context is created."""
    monkeypatch.setattr(contexts, "available_bytes", lambda: 1000)
    plan = [(CacheShape("1B", FLASH, 256), PATTERNS[:2])]
    found = contexts.measure(plan, lambda: None, spec="0.3.9+patched", budget=0.0)
    assert [each.skipped for each in found] == ["skipped: needs 2 GB, 0 GB there"] * 2
