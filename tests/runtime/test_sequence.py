"""Test the operations of a sequence, and their refusals."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability, MemoryType, Pooling
from pyllamakv.errors import (
    ArgumentTypeError,
    Closed,
    PartialRemovalRefused,
    SharedCells,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.sequence import shift_refusal

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.sequence import Sequence


def filled(folder: Path, n: int = 10, **native) -> Sequence:
    """Return a sequence of the tokens 10, 11 and so on."""
    ctx = kit.context(folder, native)
    a = ctx.sequence()
    ctx.decode(a.feed(range(10, 10 + n)))
    return a


def test_fork_shares_cells_and_continues_separately(tmp_path: Path) -> None:
    """Check cells, ledgers and logits of both."""
    a = filled(tmp_path)
    ctx = a.context
    b, c = a.fork(), a.fork(4)
    assert (ctx.kv.stats.used, ctx.kv.stats.shared) == (10, 10)
    assert (b.tokens, c.tokens) == (a.tokens, a.tokens[:4])
    assert b.logits().argmax() == a.logits().argmax()
    ctx.decode([a.feed([50]), b.feed([60]), c.feed([70])])
    assert (a.tokens[-1], b.tokens[-1], c.tokens[4:]) == (50, 60, [70])
    assert ctx.kv.stats.used == 13
    a.close()
    assert b.tokens == [*range(10, 20), 60]
    assert ctx.kv.stats.used == 12


def test_a_fork_needs_a_free_sequence(tmp_path: Path) -> None:
    """Check that no free sequence is an error without a change."""
    a = filled(tmp_path)
    for _ in range(3):
        a.fork(2)
    with pytest.raises(UsageError, match="all 4 sequences"):
        a.fork()
    with pytest.raises(UsageError, match="0 or more"):
        a.fork(-1)


def test_streams_are_copied_whole_and_cut(tmp_path: Path) -> None:
    """Check the order of calls if sequences have separate streams."""
    ctx = kit.model(
        tmp_path, capabilities=ALL | Capability.STREAMS | Capability.KV_UNIFIED
    ).context(n_ctx=64, n_seq_max=2, kv_unified=False)
    assert ctx.stream_per_sequence
    a = ctx.sequence()
    ctx.decode(a.feed(range(10, 20)))
    ranges, copy = [], ctx.native.seq_cp
    ctx.native.seq_cp = lambda *args: (ranges.append(args[3:]), copy(*args))
    b = a.fork(4)
    assert ranges == [(-1, -1)]
    assert b.tokens == a.tokens[:4]
    b.shift(None, None, 5)
    assert b.positions == [5, 6, 7, 8]


@pytest.mark.parametrize("n_streams", [1, -1])
def test_fork_shares_cells_without_granted_streams(tmp_path: Path, n_streams: int) -> None:
    """If streams were not granted, or cannot be detected, a fork shares its cells."""
    able = ALL | Capability.STREAMS | Capability.KV_UNIFIED
    made = kit.model(tmp_path, capabilities=able, unifies=True)
    tell = made.native.context_info
    made.native.context_info = lambda handle: replace(tell(handle), n_streams=n_streams)
    ctx = made.context(n_ctx=64, n_seq_max=4, kv_unified=False)
    assert (ctx.stream_per_sequence, ctx.partitions) == (False, 1 if n_streams == 1 else 4)
    a = ctx.sequence()
    ctx.decode(a.feed(range(10, 20)))
    calls, copy = [], ctx.native.seq_cp
    ctx.native.seq_cp = lambda *args: (calls.append(args[3:]), copy(*args))
    b = a.fork(4)
    assert calls == [(-1, 4) if n_streams == 1 else (-1, -1)]
    for move in (lambda: b.shift(2, None, 5), lambda: a.divide(None, 3, 2)):
        with pytest.raises(SharedCells):
            move()
    assert (a.positions, b.positions) == ([*range(10)], [*range(4)])
    assert ctx.kv.stats.used == 10


def test_hybrid_fork_with_a_shared_state_is_not_shifted(tmp_path: Path) -> None:
    """A shift would move a fork's state and none of its cells: there is no permission for it."""
    able = ALL | Capability.STREAMS | Capability.KV_UNIFIED
    made = kit.model(tmp_path, capabilities=able)
    tell = made.native.context_info
    made.native.context_info = lambda handle: replace(tell(handle), memory=MemoryType.HYBRID)
    ctx = made.context(n_ctx=64, n_seq_max=2, kv_unified=False)
    a = ctx.sequence()
    ctx.decode(a.feed(range(10, 20)))
    b = a.fork()
    with pytest.raises(SharedCells, match="state"):
        b.shift(None, None, 5, allow_shared=True)
    assert b.positions == [*range(10)]


def test_trimming_keeps_the_first_tokens(tmp_path: Path) -> None:
    """Check the number removed, and the position that follows."""
    a = filled(tmp_path)
    assert a.trim(20) == 0
    assert a.trim(7) == 3
    assert (a.tokens, a.next_pos, a.pos_max) == (list(range(10, 17)), 7, 6)
    assert a.trim(0) == 7
    assert (a.tokens, a.pos_max) == ([], -1)
    with pytest.raises(UsageError):
        a.trim(-1)


def test_removal_keeps_the_positions_of_other_tokens(tmp_path: Path) -> None:
    """Check ranges with open ends, and that a shift closes the gap."""
    a = filled(tmp_path)
    assert a.remove(4, 8) == 4
    assert a.positions == [0, 1, 2, 3, 8, 9]
    assert a.remove(5, 5) == 0
    a.shift(8, None, -4)
    assert a.positions == list(range(6))
    assert (a.next_pos, a.pos_max) == (6, 5)
    assert a.remove(None, 2) == 2
    assert a.remove() == 4
    assert not len(a)


@pytest.mark.parametrize(("p0", "p1"), [(5, 3), (-1, 4), (0, -1)])
def test_wrong_ranges_are_refused(tmp_path: Path, p0: int, p1: int) -> None:
    """Check all operations that take a range."""
    a = filled(tmp_path)
    for attempt in (
        lambda: a.remove(p0, p1),
        lambda: a.shift(p0, p1, 1),
        lambda: a.divide(p0, p1, 2),
    ):
        with pytest.raises(UsageError):
            attempt()
    assert a.positions == list(range(10))


def test_positions_beyond_the_limit_end_ranges_and_refuse_shifts(tmp_path: Path) -> None:
    """Beyond the limit, the end of a range is clamped, and a shift is refused."""
    a = filled(tmp_path)
    end = 2**30
    for delta in (end - 9, end, -end, 2**40, -(2**40)):
        with pytest.raises(UsageError, match=r"2\^30 - 1"):
            a.shift(0, None, delta)
    assert a.positions == list(range(10))
    a.shift(0, 2**40, end - 10)
    assert a.pos_max == end - 1
    assert a.remove(2**40, None) == a.remove(end, 2**35) == 0
    a.divide(5, 2**40, 2**40)
    assert a.positions == [0] * 10
    assert a.remove(0, 2**40) == 10


def test_a_memory_without_single_tokens_refuses_parts(tmp_path: Path) -> None:
    """Check that nothing changed, and that the whole sequence can be removed."""
    a = filled(tmp_path, partial=False)
    with pytest.raises(PartialRemovalRefused, match="nothing"):
        a.remove(4, 8)
    assert len(a) == 10
    assert a.context.kv.stats.used == 10
    assert a.remove() == 10


def test_shift_of_shared_cells_requires_permission(tmp_path: Path) -> None:
    """Check shift and divide of a fork, with and without permission."""
    a = filled(tmp_path)
    b = a.fork(6)
    a.context.decode([b.feed([99])])
    for attempt in (lambda: a.shift(0, None, 3), lambda: b.divide(2, 4, 2)):
        with pytest.raises(SharedCells, match="shares these cells") as caught:
            attempt()
    assert caught.value.sequences == (a.id,)
    assert a.pos_max == 9
    a.shift(6, None, 5)
    b.shift(6, None, 2)
    assert (a.positions[6:], b.positions[6:]) == ([11, 12, 13, 14], [8])
    a.shift(0, 6, 1, allow_shared=True)
    assert a.positions[:6] == b.positions[:6] == [1, 2, 3, 4, 5, 6]
    assert b.positions[6:] == [8]
    assert (a.pos_min, b.pos_min, b.pos_max) == (1, 1, 8)
    b.close()
    a.shift(None, None, 1)
    assert a.pos_min == 2


def test_a_restored_copy_has_cells_of_its_own(tmp_path: Path) -> None:
    """Check the alternative in the message."""
    a = filled(tmp_path)
    b = a.fork()
    b.restore(b.save())
    b.shift(None, None, 3)
    assert (a.pos_min, b.pos_min) == (0, 3)


def test_shift_onto_existing_positions_is_refused(tmp_path: Path) -> None:
    """Check a shift onto tokens that stay, and below zero."""
    a = filled(tmp_path)
    for p0, p1, delta in ((5, None, -1), (0, 3, 2), (None, None, -1)):
        with pytest.raises(UsageError, match="remove those tokens"):
            a.shift(p0, p1, delta)
    assert a.pos_max == 9


def test_divided_positions_are_rounded_down(tmp_path: Path) -> None:
    """Check positions, and wrong divisors."""
    a = filled(tmp_path, 6)
    a.divide(2, None, 2)
    assert a.positions == [0, 1, 1, 1, 2, 2]
    assert a.pos_max == 2
    with pytest.raises(UsageError, match="divisor"):
        a.divide(None, None, 0)


def test_shift_of_a_memory_without_shifts_is_refused(tmp_path: Path) -> None:
    """Check that llama.cpp, which would abort, is not asked."""
    a = filled(tmp_path, can_shift=False)
    with pytest.raises(Unsupported, match=r"cannot shift positions: .* keys of this model"):
        a.shift(None, None, 1)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_type_that_cannot_shift_is_named(tmp_path: Path, kind: str) -> None:
    """Some releases rotate no keys of these types; another type of K works."""
    ctx = kit.context(tmp_path, {"can_shift": False}, type_k=kind)
    a = ctx.sequence()
    a.step(5)
    for move in (lambda: a.shift(None, None, 1), lambda: a.divide(None, None, 2)):
        with pytest.raises(Unsupported, match=f"rotate keys of type {kind}; .*type_k='f16'"):
            move()


def test_pooling_is_a_reason_for_a_memory_without_shifts(tmp_path: Path) -> None:
    """Some releases cannot shift with means, whatever the keys of the model are."""
    ctx = kit.context(tmp_path, {"can_shift": False})
    pooled = replace(ctx.info, pooling=Pooling.MEAN)
    assert "pooling='mean', for which another" in shift_refusal(ctx.model, ctx.params, pooled)
    assert "pooling" not in shift_refusal(ctx.model, ctx.params, ctx.info)


def test_closed_sequence_frees_its_cells_and_refuses_use(tmp_path: Path) -> None:
    """Check that its cells are free, its id is reused, and every use is refused."""
    a = filled(tmp_path)
    ctx = a.context
    with a:
        pass
    a.close()
    assert ctx.kv.stats.used == 0
    for attempt in (
        lambda: a.feed([1]),
        lambda: a.step(1),
        a.fork,
        a.save,
        a.logits,
        lambda: a.trim(0),
        lambda: a.remove(),
        lambda: a.pos_max,
        lambda: ctx.kv.rows(0, a),
    ):
        with pytest.raises(Closed, match="sequence 0 was closed"):
            attempt()
    again = ctx.sequence()
    assert (again.id, len(again)) == (0, 0)


def test_close_after_the_worker_ended_raises_nothing(tmp_path: Path) -> None:
    """Check that the end of a `with` block does not hide the exception in it."""
    a = filled(tmp_path)

    def dead(*args: object) -> bool:
        raise WorkerDied("ended by signal 6")

    a.context.native.seq_rm = dead
    a.close()
    assert not a.open


@pytest.mark.parametrize(
    "wrong",
    [
        *(b"bytes", "text", 7, None, [1.5], ["a"], [True]),
        *({5, 6}, frozenset([5]), {5: 6}, {5: 6}.keys(), {5: 6}.values()),
        *(iter([5, 6]), (token for token in [5, 6]), map(int, "56")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_feed_refuses_all_but_ordered_sequences_of_numbers(tmp_path: Path, wrong: object) -> None:
    """Check that nothing is decoded or consumed."""
    a = filled(tmp_path)
    before = a.tokens
    for call in (a.feed, a.prefill):
        with pytest.raises(ArgumentTypeError, match="tokens"):
            call(wrong)
    assert a.tokens == before


def test_each_ordered_sequence_of_numbers_is_fed(tmp_path: Path) -> None:
    """Check the kinds of sequences, and a wrong choice of logits."""
    a = filled(tmp_path)
    for tokens in ([5, 6], (5, 6), range(5, 7), array("i", [5, 6]), np.array([5, 6])):
        assert a.feed(tokens).tokens.tolist() == [5, 6]
    with pytest.raises(UsageError, match="one of last, all, none"):
        a.feed([1], logits="some")


def test_a_sequence_is_named_by_number_and_length(tmp_path: Path) -> None:
    """Check the text of a sequence, also without tokens."""
    a = filled(tmp_path)
    a.context.decode(a.feed([7]))
    assert a.tokens[-1] == 7
    assert repr(a) == "<Sequence 0, 11 tokens>"
    assert a


def test_copy_replaces_the_tokens_of_another_sequence(tmp_path) -> None:
    """The cells are shared, the other's own tokens removed, a copy to itself changes nothing."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed([1, 2, 3, 4]), b.feed([9, 9])])
    assert a.copy_to(b, 3) == 3
    assert (b.tokens, ctx.kv.stats.shared, ctx.kv.stats.used) == ([1, 2, 3], 3, 4)
    assert a.copy_to(a, 1) == 4
    assert a.copy_to(b) == 4
    assert a.copy_to(b, 0) == 0
    assert (a.tokens, b.tokens) == ([1, 2, 3, 4], [])


def test_a_copy_that_is_refused_changes_nothing(tmp_path) -> None:
    """A memory without partial copies refuses before the other sequence is emptied."""
    ctx = kit.context(tmp_path, {"partial": False})
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed([1, 2, 3]), b.feed([9, 9])])
    with pytest.raises(PartialRemovalRefused):
        a.copy_to(b, 2)
    assert b.tokens == [9, 9]
    assert a.copy_to(b, 3) == 3
