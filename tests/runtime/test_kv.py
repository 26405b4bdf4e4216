"""Test the statistics of a cache, and reports of moved cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, MemoryType, RawDefrag
from pyllamakv.errors import NoKVSlot, PromptTooLong, Unsupported, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence


def scattered(ctx: Context) -> Sequence:
    """Give every other cell of 16 to one sequence."""
    a, b = ctx.sequence(), ctx.sequence()
    for i in range(8):
        ctx.decode([a.feed([10 + i]), b.feed([5])])
    a.context.kv.update()
    b.remove()
    return a


def test_a_snapshot_shows_every_cell(tmp_path: Path) -> None:
    """Check positions, sequences, and the library's own counts."""
    ctx = kit.context(tmp_path, n_ctx=16)
    a = scattered(ctx)
    snapshot = ctx.kv.snapshot()
    cells = snapshot.streams[0]
    assert np.flatnonzero(cells.has(a.id)).tolist() == list(range(0, 16, 2))
    assert cells.pos[::2].tolist() == list(range(8))
    assert cells.info.used == snapshot.stats.used == 8
    assert (snapshot.contiguous, snapshot.stats.holes, snapshot.fits(2)) == (True, 8, False)


def test_a_defragmentation_is_reported_and_visible(tmp_path: Path) -> None:
    """Check the report, the moves between two snapshots, and that rows and tokens are unchanged."""
    ctx = kit.context(tmp_path, n_ctx=16)
    a = scattered(ctx)
    before, rows = ctx.kv.snapshot(), ctx.kv.rows(1, a)
    report = ctx.kv.defrag()
    after, again = ctx.kv.snapshot(), ctx.kv.rows(1, a)
    moves = before.moves_to(after)
    assert (report.cells, report.passes, report.seconds) == (4, 1, 1e-6)
    assert (moves.cells, moves.vanished, moves.appeared) == (4, 0, 0)
    assert after.stats.holes == 1
    assert (rows.k == again.k).all()
    assert (rows.v == again.v).all()
    assert rows.pos.tolist() == list(range(8))
    assert ctx.kv.defrag().cells == 0


def test_defrag_report_without_native_counts_is_computed(tmp_path: Path) -> None:
    """Check the report of a build without counts of its own."""
    ctx = kit.context(tmp_path, n_ctx=16)
    scattered(ctx)
    defrag = ctx.native.defrag

    def silent(handle):
        defrag(handle)
        return RawDefrag(-1, -1, -1, -1, -1, 5)

    ctx.native.defrag = silent
    report = ctx.kv.defrag()
    assert report.cells == 4
    assert report.moves >= 1
    assert (report.bytes, report.graphs, report.passes) == (None, None, None)


def test_missing_capabilities_are_named(tmp_path: Path) -> None:
    """Check defragmentation, cells and states."""
    poor = Capability.SAMPLER
    ctx = kit.context(tmp_path, {"capabilities": poor})
    ctx.sequence().step(5)
    for attempt, name in (
        (ctx.kv.defrag, "DEFRAG"),
        (ctx.kv.snapshot, "CELLS"),
        (lambda: ctx.kv.stats, "CELLS"),
        (lambda: ctx.kv.state(0), "STATES"),
    ):
        with pytest.raises(Unsupported) as caught:
            attempt()
        assert caught.value.capability == name


def test_a_memory_of_an_unknown_class_has_no_snapshot(tmp_path: Path) -> None:
    """It is not reported as a memory without cells."""
    ctx = kit.context(tmp_path)
    for name, value in (("memory", MemoryType.OTHER), ("n_caches", 0)):
        object.__setattr__(ctx.info, name, value)
    with pytest.raises(Unsupported, match="class whose cells pyllamakv cannot read") as caught:
        ctx.kv.snapshot()
    assert caught.value.capability == "CELLS"
    assert ctx.kv.try_snapshot() is None


def test_rows_need_cells_and_a_layer(tmp_path: Path) -> None:
    """Check wrong layers, caches and sequences, and empty sequences."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    with pytest.raises(UsageError, match="no cells"):
        ctx.kv.rows(0, a)
    ctx.decode(a.feed([5, 6]))
    assert ctx.kv.rows(0, a.id).k.shape == (2, 64)
    for arguments, options, message in (
        ((2, a), {}, "layer 2"),
        ((-1, a), {}, "layer -1"),
        ((0, a), {"cache": 1}, "cache 1"),
        ((0, 9), {}, "sequence 9"),
    ):
        with pytest.raises(UsageError, match=message):
            ctx.kv.rows(*arguments, **options)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_rows_are_ordered_by_position(tmp_path: Path, flash_attn: bool) -> None:
    """Check a sequence whose cells are out of order, V by rows and by columns."""
    ctx = kit.context(tmp_path, n_ctx=16, flash_attn=flash_attn)
    a = scattered(ctx)
    for token in (100, 101):
        a.step(token)
    rows = ctx.kv.rows(0, a)
    assert rows.pos.tolist() == list(range(10))
    values = rows.k.view(np.float16)[:, 0]
    assert np.round(values.astype(float)).tolist() == [*range(10, 18), 100, 101]
    assert (rows.v == rows.k).all()
    assert (rows.type_k.name, rows.type_v.name) == ("f16", "f16")
    assert ctx.kv.state(a).sections[0].v_transposed is not flash_attn


def test_a_healing_build_moves_inside_a_decode(tmp_path: Path) -> None:
    """Check that moves by the library itself are visible in snapshots."""
    ctx = kit.context(tmp_path, {"heals": True, "capabilities": ALL}, n_ctx=16)
    scattered(ctx)
    before = ctx.kv.snapshot()
    c = ctx.sequence()
    ctx.decode(c.feed([1, 2, 3, 4]))
    moves = before.moves_to(ctx.kv.snapshot())
    assert (moves.cells, moves.vanished, moves.appeared) == (4, 0, 4)
    assert ctx.counters.defrags == 1


def test_a_prompt_longer_than_the_cache_has_its_own_error(tmp_path: Path) -> None:
    """Nothing is decoded, and tokens that are in the sequence count."""
    ctx = kit.context(tmp_path, n_ctx=16)
    a = ctx.sequence()
    with pytest.raises(PromptTooLong, match="17 tokens does not fit into a cache of 16") as caught:
        a.prefill([7] * 17)
    assert (caught.value.needed, caught.value.available) == (17, 16)
    assert not isinstance(caught.value, NoKVSlot)
    assert len(a) == ctx.kv.stats.used == 0
    a.prefill([7] * 10)
    with pytest.raises(PromptTooLong, match="18 tokens"):
        a.prefill([7] * 8)
    assert len(a) == 10
    a.prefill([7] * 6)
