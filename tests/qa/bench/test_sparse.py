"""Test that the benchmarks of sparse caches run and report their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.scenarios import synthetic_models
from qa.bench import sparse

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

SMALL = synthetic_models.SHAPES["tiny"]


@pytest.mark.slow
def test_a_sparse_cache_is_measured(stock: Variant, patched: Variant) -> None:
    """Each setting has all samples, and the cache was compacted in between."""
    ticks: list[None] = []
    found = sparse.figures(
        lambda: ticks.append(None),
        stock.folder,
        patched.folder,
        pairs=2,
        sizes=(2048,),
        shape=SMALL,
    )
    assert [each.met is not None for each in found] == [True] * len(sparse.SETTINGS)
    for each in found:
        assert len(each.data["sparse"]) == len(each.data["compacted"]) == 2
        assert all(seconds > 0 for seconds in each.data["moved"])
    assert ticks
