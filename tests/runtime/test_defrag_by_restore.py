"""Test defragmentation by saving and restoring sequences, for libraries that move no cells."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import NativeError, StateError, Unsupported
from pyllamakv.runtime import defrag_by_restore

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

STOCK = {"capabilities": ALL & ~Capability.DEFRAG, "contiguous": False}


def sparse(ctx: Context) -> tuple[Sequence, Sequence]:
    """Put one sequence at the start of the cache and one at its end, with a gap between them."""
    low, gone, high = ctx.sequence(), ctx.sequence(), ctx.sequence()
    low.prefill([10, 11, 12, 13])
    gone.prefill([5] * 30)
    high.prefill([20, 21, 22, 23, 24])
    gone.close()
    return low, high


def test_defragmentation_by_restore_keeps_the_bytes(tmp_path: Path) -> None:
    """Check cells, rows, tokens and the report, and that only the highest cells were written."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    rows = {each: ctx.kv.rows(1, each) for each in (low, high)}
    there = ctx.kv.snapshot().streams[0].has(low.id)
    report = ctx.kv.defrag()
    after = ctx.kv.snapshot()
    assert (after.stats.used, after.stats.used_max_p1, after.stats.holes) == (9, 9, 1)
    assert (after.streams[0].has(low.id) == there).all()
    for each, old in rows.items():
        now = ctx.kv.rows(1, each)
        assert (now.pos == old.pos).all()
        assert (now.k == old.k).all()
        assert (now.v == old.v).all()
    assert high.tokens == [20, 21, 22, 23, 24]
    assert report.method == "restore"
    assert "cannot defragment this memory" in report.refusal
    assert (report.cells, report.passes, report.graphs) == (5, 1, 0)
    assert report.bytes == len(ctx.native.state_save(ctx.handle, high.id))
    ctx.decode([low.feed([7]), high.feed([8])])


def test_compact_cache_saves_no_states(tmp_path: Path) -> None:
    """Check that nothing is saved if the cache is compact."""
    ctx = kit.context(tmp_path, STOCK)
    ctx.sequence().prefill([1, 2, 3])
    ctx.native.state_save = None
    report = ctx.kv.defrag()
    assert (report.cells, report.moves, report.bytes, report.passes) == (0, 0, 0, 0)
    assert report.method == "none"


def test_the_report_states_how_cells_moved(tmp_path: Path) -> None:
    """A library that moves cells is "in-place"; one that refuses this memory has a reason."""
    ctx = kit.context(tmp_path, {"contiguous": False})
    sparse(ctx)
    report = ctx.kv.defrag()
    assert (report.method, report.refusal, report.cells) == ("in-place", None, 5)
    assert ctx.kv.defrag().method == "none"
    ctx = kit.context(tmp_path, {"contiguous": False})
    sparse(ctx)
    ctx.native.defrag = lambda _: refused("cell indexes are kept elsewhere")
    ctx.info = replace(ctx.info, defrag=False)
    report = ctx.kv.defrag()
    assert (report.method, report.refusal) == ("restore", "cell indexes are kept elsewhere")
    ctx.info = replace(ctx.info, defrag=True)
    with pytest.raises(Unsupported, match="kept elsewhere"):
        ctx.kv.defrag()


def refused(reason: str) -> NoReturn:
    """Refuse a defragmentation, like a library."""
    raise Unsupported(reason, "DEFRAG")


def test_shared_cells_are_refused(tmp_path: Path) -> None:
    """Check the reason, that nothing changed, and that it works after the fork is closed."""
    ctx = kit.context(tmp_path, STOCK)
    _, high = sparse(ctx)
    fork = high.fork()
    before = ctx.kv.snapshot()
    with pytest.raises(Unsupported, match="5 cells are shared") as caught:
        ctx.kv.defrag()
    assert caught.value.capability == "DEFRAG"
    assert (ctx.kv.snapshot().streams[0].pos == before.streams[0].pos).all()
    fork.close()
    assert ctx.kv.defrag().cells == 5


def test_restore_defragmentation_can_be_disabled(tmp_path: Path) -> None:
    """Check builds with the feature disabled, and builds without it."""
    ctx = kit.context(tmp_path, STOCK)
    sparse(ctx)
    with pytest.raises(Unsupported, match="patched variant"):
        ctx.kv.defrag(fallback=False)
    poor = kit.context(tmp_path, {**STOCK, "capabilities": Capability.CELLS})
    sparse(poor)
    with pytest.raises(Unsupported, match="neither move nor save"):
        poor.kv.defrag()


def test_unguarded_context_does_not_defragment_by_restore(tmp_path: Path) -> None:
    """Check that the feature is off by default."""
    made = kit.library(isolated=True, **STOCK).load_model(kit.write_gguf(tmp_path / "tiny.gguf"))
    ctx = made.context(n_ctx=64, n_batch=32, n_ubatch=8, n_seq_max=4, guard="off")
    sparse(ctx)
    with pytest.raises(Unsupported, match="guard"):
        ctx.kv.defrag()


def test_state_shorter_than_its_cells_is_refused(tmp_path: Path) -> None:
    """Check memory whose states are shorter than its content, before anything is removed."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    save = ctx.native.state_save
    ctx.native.state_save = lambda handle, _: save(handle, low.id)
    with pytest.raises(Unsupported, match="keeps 4 of its 5 cells"):
        ctx.kv.defrag()
    assert int(ctx.kv.snapshot().streams[0].has(high.id).sum()) == 5


def refuse(ctx: Context, times: int) -> list[int]:
    """Make the library refuse the next states; return the calls."""
    load, asked = ctx.native.state_load, []

    def refusing(handle: int, seq: int, data: bytes) -> int:
        asked.append(seq)
        if len(asked) <= times:
            if len(asked) % 2:
                raise NativeError("refused", code=-1008)
            return 0
        return load(handle, seq, data)

    ctx.native.state_load = refusing
    return asked


def test_refused_restore_is_repeated_in_an_empty_cache(tmp_path: Path) -> None:
    """Check that after a refusal for lack of a hole, an empty cache is used."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    asked = refuse(ctx, 1)
    report = ctx.kv.defrag()
    assert asked[0] == high.id
    assert sorted(asked[1:]) == [low.id, high.id]
    assert report.passes == 2
    assert ctx.kv.snapshot().stats.used_max_p1 == 9
    assert np.array_equal(ctx.kv.rows(0, high).pos, np.arange(5))


def test_unrestorable_sequence_is_in_the_error(tmp_path: Path) -> None:
    """Check the error, the ledgers, and that the state in the error can be restored."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    load = ctx.native.state_load
    refuse(ctx, 100)
    with pytest.raises(StateError, match="refused a state") as caught:
        ctx.kv.defrag()
    assert set(caught.value.saved) == {low.id, high.id}
    assert (len(low), len(high), ctx.kv.stats.used) == (0, 0, 0)
    ctx.native.state_load = load
    high.restore(caught.value.saved[high.id])
    assert high.tokens == [20, 21, 22, 23, 24]
    high.step(25)


def test_failed_save_keeps_the_states_saved_before(tmp_path: Path) -> None:
    """Check that a failed save in the second round loses nothing of the first."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    refuse(ctx, times=1)
    save = ctx.native.state_save

    def saving(handle: int, seq: int) -> bytes:
        if seq == low.id:
            msg = "no"
            raise NativeError(msg)
        return save(handle, seq)

    ctx.native.state_save = saving
    with pytest.raises(StateError) as caught:
        ctx.kv.defrag()
    assert set(caught.value.saved) == {high.id}
    assert isinstance(caught.value.__cause__, NativeError)
    assert low.tokens == [10, 11, 12, 13]
    high.restore(caught.value.saved[high.id])
    assert high.tokens == [20, 21, 22, 23, 24]


def interrupt(ctx: Context, at: set[int], *, after: bool) -> list[str]:
    """Raise Ctrl-C in the calls of these numbers that change the cache; return the calls."""
    called: list[str] = []

    def wrap(name: str) -> None:
        call = getattr(ctx.native, name)

        def calling(*words: object) -> object:
            called.append(name)
            now = len(called) in at
            if now and after:
                with suppress(NativeError):
                    call(*words)
            if now:
                raise KeyboardInterrupt
            return call(*words)

        setattr(ctx.native, name, calling)

    for name in ("clear", "seq_rm", "state_load"):
        wrap(name)
    return called


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [{1}, {2}, {3}, {4}, {5}, {1, 3}, {2, 3, 4}, {3, 7}])
def test_interrupted_defragmentation_keeps_every_sequence(
    tmp_path: Path, at: set[int], after: bool
) -> None:
    """Check tokens and rows after a Ctrl-C in any call, and after several of them."""
    ctx = kit.context(tmp_path, STOCK)
    sequences = list(sparse(ctx))
    rows = {each: ctx.kv.rows(1, each) for each in sequences}
    tokens = [each.tokens for each in sequences]
    refuse(ctx, 1)
    called = interrupt(ctx, at, after=after)
    with pytest.raises(KeyboardInterrupt):
        ctx.kv.defrag()
    assert len(called) >= max(at)
    assert [each.tokens for each in sequences] == tokens
    for each, old in rows.items():
        now = ctx.kv.rows(1, each)
        assert (now.pos == old.pos).all()
        assert (now.k == old.k).all()
    assert ctx.kv.stats.used == 9
    ctx.decode([each.feed([7]) for each in sequences])


def test_failed_clear_keeps_the_sequences(tmp_path: Path) -> None:
    """Check that a failed clear in the second round loses nothing of the first."""
    ctx = kit.context(tmp_path, STOCK)
    low, high = sparse(ctx)
    refuse(ctx, 1)

    def failing(handle: int, data: bool) -> None:
        raise NativeError("no")

    ctx.native.clear = failing
    with pytest.raises(StateError) as caught:
        ctx.kv.defrag()
    assert set(caught.value.saved) == {low.id, high.id}
    high.restore(caught.value.saved[high.id])
    assert high.tokens == [20, 21, 22, 23, 24]


def test_a_cache_without_holes_is_compact(tmp_path: Path) -> None:
    """Check an empty, a compact and a sparse cache."""
    ctx = kit.context(tmp_path, STOCK)
    assert defrag_by_restore.is_compact(ctx.kv.snapshot())
    sparse(ctx)
    assert not defrag_by_restore.is_compact(ctx.kv.snapshot())
    ctx.kv.defrag()
    assert defrag_by_restore.is_compact(ctx.kv.snapshot())
