"""Test that a sequence is never cut to where its window lost a part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
import runtime_kit
from hypothesis import given
from hypothesis import strategies as st
from snapshot_kit import CELLS, cell_map

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import Cancelled, NoKVSlot, PartialRemovalRefused, UsageError
from pyllamakv.runtime import decode_failure, swa
from pyllamakv.runtime.batch import Batch
from pyllamakv.runtime.kv import KV
from pyllamakv.runtime.snapshot import CellMap, Snapshot
from pyllamakv.scenarios import cell_ledger, kv_rows

WINDOW = 8


def sliding(positions: dict[int, list[int]]) -> Snapshot:
    """Return the snapshot of a small cache that has these positions of each sequence."""
    cells = [(pos, seq) for seq, own in positions.items() for pos in own]
    pos = np.array([each for each, _ in cells], dtype=np.int32)
    seqs = np.array([[1 << seq] for _, seq in cells], dtype=np.uint64).reshape(len(cells), 1)
    info = SimpleNamespace(swa=True, stream=0)
    return Snapshot((CellMap(pos, np.zeros_like(pos), seqs, info),))


@pytest.fixture
def ctx(tmp_path, monkeypatch) -> Any:
    """Return a context whose sliding-window cache has positions 12 and later of sequence 0."""
    context = runtime_kit.context(tmp_path)
    context.info = replace(context.info, n_swa=WINDOW)
    there = sliding({0: list(range(12, 30))})
    monkeypatch.setattr(KV, "try_snapshot", lambda _: there)
    sequence = context.sequence()
    sequence.ledger.extend(range(30), range(30), range(30))
    return context


def test_cut_requires_the_window_of_the_next_token(ctx) -> None:
    """A window of 8 includes seven positions before the next one."""
    missing = partial(swa.first_missing_position, ctx.info.n_swa, ctx.kv, 0)
    assert missing(list(range(30))) is None
    assert missing(list(range(19))) is None
    assert missing(list(range(18))) == 11
    assert missing([]) is None
    # A gap of the sequence itself is not one of its window.
    assert missing([*range(9), *range(12, 18)]) is None


def test_memory_without_a_window_reads_no_cells(ctx, monkeypatch) -> None:
    """Most memories have no window, and a cut does not read their cells."""
    ctx.info = replace(ctx.info, n_swa=0)
    monkeypatch.setattr(KV, "try_snapshot", lambda _: pytest.fail("the cells were read"))
    assert swa.first_missing_position(ctx.info.n_swa, ctx.kv, 0, list(range(3))) is None


def test_a_cut_behind_the_window_is_refused(ctx) -> None:
    """Nothing changes, and the message names the missing position."""
    sequence = SimpleNamespace(ledger=ctx.ledgers[0])
    positions = sequence.ledger.without(16, None)
    with pytest.raises(PartialRemovalRefused, match="dropped position 9"):
        swa.check(ctx, 0, positions, "removing them")
    assert len(sequence.ledger) == 30
    swa.check(ctx, 0, sequence.ledger.without(24, None), "removing them")
    swa.check(ctx, 0, sequence.ledger.without(None, None), "removing them")


def test_sequences_of_one_token_need_equal_windows(ctx, monkeypatch) -> None:
    """Only a token of several sequences needs them, and a refusal decodes nothing."""
    ctx.info = replace(ctx.info, n_caches=2)
    other = ctx.sequence()
    other.ledger.extend(range(30), range(30), range(40, 70))
    begins = {0: 12, 1: 20}
    monkeypatch.setattr(ctx.native, "seq_pos_min", lambda _, seq: begins[seq])
    monkeypatch.setattr(ctx.native, "seq_pos_max", lambda *_: 29)
    together = Batch.of([5], [30], [0, 1], counts=[2])
    with pytest.raises(UsageError, match=r"12\.\.29 of sequence 0, 20\.\.29 of sequence 1"):
        ctx.decode(together)
    assert len(ctx.ledgers[0]) == len(other) == 30
    ctx.decode(Batch.of([5, 5], [30, 30], [0, 1]))
    begins[1] = 12
    ctx.decode(Batch.of([6], [31], [0, 1], counts=[2]))
    assert len(ctx.ledgers[0]) == len(other) == 32
    # With only one cache, the library is not called.
    ctx.info, begins[1] = replace(ctx.info, n_caches=1), 20
    ctx.decode(Batch.of([7], [32], [0, 1], counts=[2]))


def test_failed_decode_empties_sequences_that_cannot_be_rolled_back(ctx, monkeypatch) -> None:
    """The error names the sequences; the others keep their tokens."""
    other = ctx.sequence()
    other.ledger.extend(range(4), range(4), range(40, 44))
    lost = sliding({0: list(range(26, 30)), 1: list(range(4))})
    monkeypatch.setattr(KV, "try_snapshot", lambda _: lost)
    monkeypatch.setattr(ctx.decoder, "emptied", decode_failure.roll_back(ctx, [0, 1]))
    assert ctx.emptied == (0,)
    assert len(ctx.ledgers[0]) == 0
    assert len(other) == 4
    error = decode_failure.failure(ctx, 2, None, 0)
    assert "sequences 0 were emptied" in str(error)


def test_state_without_rollback_is_cleared(tmp_path, monkeypatch) -> None:
    """A memory of states refuses to remove the last tokens of an aborted decode."""
    context = runtime_kit.context(tmp_path)
    context.sequence().ledger.extend(range(4), range(4), range(4))
    removed: list[tuple[int, int]] = []

    def seq_rm(_handle: object, _seq: int, p0: int, p1: int) -> bool:
        removed.append((p0, p1))
        return p0 < 0

    monkeypatch.setattr(context.native, "seq_rm", seq_rm)
    monkeypatch.setattr(context.native, "seq_pos_max", lambda *_: 9)
    assert decode_failure.roll_back(context, [0]) == (0,)
    assert removed == [(4, -1), (-1, -1)]
    assert len(context.ledgers[0]) == 0


@pytest.mark.regression(
    "after a cancelled decode in a recurrent memory, sequences outside of the batch had wrong "
    "states",
    by="random_operations",
    of="Python",
)
def test_a_computation_that_ends_halfway_empties_all_states(tmp_path, monkeypatch) -> None:
    """States of others change during the computation: all are emptied, and the error names them."""
    context = runtime_kit.context(tmp_path)
    context.info = replace(context.info, memory=MemoryType.RECURRENT)
    one, other = context.sequence(), context.sequence()
    context.decode([one.feed([5, 6]), other.feed([7])])
    context.native.fail_next.append(1)
    with pytest.raises(NoKVSlot):
        context.decode(one.feed([8]))
    assert (len(one), len(other), context.emptied) == (2, 1, ())
    for decode in (
        lambda: one.step(8),
        lambda: context.step_all([one], [8]),
        lambda: context.decode(one.feed([8, 9])),
    ):
        context.native.fail_next.append(2)
        with pytest.raises(Cancelled, match="sequences 0, 1 were emptied"):
            decode()
        assert (len(one), len(other), context.kv.stats.used) == (0, 0, 0)
        context.decode([one.feed([5, 6]), other.feed([7])])


@pytest.mark.regression(
    "a decode without a slot in a sliding-window cache full of shared cells reported another "
    "cause than a full cache",
    by="random_operations",
    of="Python",
)
def test_shared_cells_before_the_window_are_not_reused(ctx, monkeypatch) -> None:
    """Unshared cells before the window may be reused; otherwise the cause is a full cache."""
    own, shared = sliding({0: list(range(12, 30))}), sliding({0: list(range(12, 30)), 1: [40]})
    shared.streams[0].seqs[:6] |= np.uint64(1 << 1)
    free = np.array([-1, -1], dtype=np.int32)
    more = CellMap(free, free * 0, np.zeros((2, 1), dtype=np.uint64), own.streams[0].info)
    # The next token is at 30 and uses 23 to 29: eleven are before, six of which are shared.
    assert [swa.reusable_cells(each, WINDOW) for each in (*own.streams, more)] == [11, 2]
    assert swa.reusable_cells(shared.streams[0], WINDOW) == 5
    base = CellMap(np.full(40, -1, np.int32), np.zeros(40, np.int32), np.zeros((40, 1), np.uint64))
    monkeypatch.setattr(KV, "try_snapshot", lambda _: Snapshot((base, *shared.streams)))
    error = decode_failure.failure(ctx, 1, [0] * 6)
    assert (error.cause, error.stats.free) == ("full", 40)
    assert "5 of the 19 cells for sliding windows" in str(error)
    assert decode_failure.failure(ctx, 1, [0] * 5).cause == "other"


@pytest.mark.slow
@given(CELLS, st.integers(1, 60))
def test_reusable_cells_agree_with_the_reference(cells: list, window: int) -> None:
    """Free, shared and unshared cells are counted in any order of positions."""
    cache = cell_map(cells, swa=True)
    contents = kv_rows.stream_contents(cache)
    expected = cell_ledger.reusable_cells(contents, len(cells), window)
    assert swa.reusable_cells(cache, window) == expected
