"""Test decoding one token of each of several sequences, step by step and many steps at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import runtime_kit as kit
from fakes.build import HANG, fake
from fakes.simulated import ALL

from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import Capability, ContextParams, ModelParams, SamplerParams
from pyllamakv.errors import (
    Cancelled,
    Closed,
    DecodeError,
    NativeError,
    NoKVSlot,
    StaleLogits,
    UsageError,
)
from pyllamakv.runtime.sampler import NumpySampler

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence


def three(ctx: Context) -> list[Sequence]:
    """Return three sequences of different lengths."""
    sequences = [ctx.sequence() for _ in range(3)]
    for length, each in enumerate(sequences, 1):
        ctx.decode(each.feed([5] * length))
    return sequences


def test_step_of_several_sequences_equals_single_steps(tmp_path: Path) -> None:
    """Check ledgers, indexes and logits against the same tokens decoded one by one."""
    ctx, alone = kit.context(tmp_path), kit.context(tmp_path)
    sequences, singles = three(ctx), three(alone)
    for tokens in ([7, 8, 9], (10, 11, 12), np.array([13, 14, 15])):
        ctx.step_all(sequences, tokens)
        expected = []
        for each, token in zip(singles, tokens, strict=True):
            each.step(token)
            expected.append(alone.logits().copy())
        assert np.array_equal(ctx.logits_all(), np.stack(expected))
        for place, each in enumerate(sequences):
            assert np.array_equal(each.logits(), expected[place])
            assert np.array_equal(ctx.logits(place), expected[place])
            assert np.array_equal(ctx.logits(place - 3), expected[place])
    assert [each.tokens for each in sequences] == [each.tokens for each in singles]
    assert [each.positions for each in sequences] == [each.positions for each in singles]
    assert all(type(token) is int for each in sequences for token in each.tokens)


def test_positions_follow_what_was_removed_between(tmp_path: Path) -> None:
    """Check that only the ledger of a sequence determines its next position."""
    ctx = kit.context(tmp_path)
    sequences = three(ctx)
    ctx.step_all(sequences, [7, 8, 9])
    sequences[2].trim(2)
    fork = sequences[2].fork()
    ctx.step_all(sequences, [7, 8, 9])
    assert [each.next_pos for each in sequences] == [3, 4, 3]
    ctx.step_all([fork, sequences[0]], [1, 2])
    assert (fork.tokens, sequences[0].tokens) == ([5, 5, 1], [5, 7, 7, 2])


def test_invalid_steps_are_refused_before_the_library(tmp_path: Path) -> None:
    """Check tokens, numbers, duplicate, foreign and closed sequences, and too many."""
    ctx, other = kit.context(tmp_path, n_batch=2), kit.context(tmp_path)
    a, b, c = (ctx.sequence() for _ in range(3))
    for sequences, tokens, message in (
        ([a, b], [1], "2 sequences, not 1"),
        ([a, b], [1, 259], "token 259"),
        ([a, b], [-1, 1], "token -1"),
        ([a, a], [1, 1], "each of them once"),
        ([], [], "1 to 2 sequences"),
        ([a, b, c], [1, 2, 3], "1 to 2 sequences"),
        ([a, 1], [1, 2], "must be a Sequence, not 1"),
        ([a, other.sequence()], [1, 2], "another context"),
        ([a, b], np.array([1.0, 2.0]), "whole numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            ctx.step_all(sequences, tokens)
    with pytest.raises(TypeError):
        ctx.step_all([a, b], [1, 1.5])
    assert ctx.native.calls == []
    ctx.step_all([a, b], [1, 2])
    b.close()
    with pytest.raises(Closed):
        ctx.step_all([a, b], [1, 2])
    assert a.tokens == [1]


@pytest.mark.parametrize("failure", [1, 2, -3])
def test_a_failed_step_keeps_every_token(tmp_path: Path, failure: int) -> None:
    """Check ledgers, cells and logits after each kind of failure, and that it works again."""
    ctx = kit.context(tmp_path)
    sequences = three(ctx)
    before, tokens = ctx.kv.snapshot(), [each.tokens for each in sequences]
    ctx.native.fail_next.append(failure)
    kind = {1: NoKVSlot, 2: Cancelled, -3: DecodeError}[failure]
    with pytest.raises(kind) as caught:
        ctx.step_all(sequences, [7, 8, 9])
    assert caught.value.code == failure
    ctx.native.fail_next.append(NativeError("llama.cpp threw", code=-1003))
    with pytest.raises(DecodeError, match="threw"):
        ctx.step_all(sequences, [7, 8, 9])
    assert [each.tokens for each in sequences] == tokens
    assert not len(before.moves_to(ctx.kv.snapshot()))
    for attempt in (ctx.logits, ctx.logits_all):
        with pytest.raises(StaleLogits):
            attempt()
    ctx.step_all(sequences, [7, 8, 9])
    assert [each.tokens[-1] for each in sequences] == [7, 8, 9]


def test_rows_become_stale_as_single_logits_do(tmp_path: Path) -> None:
    """Check reads before and after a later decode, and indexes without logits."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    with pytest.raises(StaleLogits, match="no decode yet"):
        ctx.logits_all()
    ctx.decode([a.feed([1, 2]), b.feed([3, 4], logits="all")])
    rows = ctx.logits_all()
    assert rows.shape == (3, ctx.n_vocab)
    assert rows.argmax(axis=1).tolist() == [ctx.logits(place).argmax() for place in (1, 2, 3)]
    kept = rows.copy()
    a.step(5)
    assert rows.stale
    for read in (lambda: rows.argmax(axis=1), rows.copy, lambda: rows[0]):
        with pytest.raises(StaleLogits):
            read()
    assert kept.shape == (3, ctx.n_vocab)
    assert "LogitsRows" in repr(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_all_rows_equals_sampling_each_row(tmp_path: Path, temperature: float) -> None:
    """Check both samplers, where the draws come in the same order."""
    ctx = kit.context(tmp_path)
    ctx.step_all(three(ctx), [7, 8, 9])
    params = SamplerParams(temperature=temperature, seed=5)
    one, many = NumpySampler(params), NumpySampler(params)
    assert many.sample_all(ctx) == [one.sample(ctx, place) for place in range(3)]
    with ctx.model.sampler() as sampler:
        assert sampler.sample_all(ctx) == ctx.logits_all().argmax(axis=1).tolist()


def test_penalties_are_refused_for_several_sequences(tmp_path: Path) -> None:
    """Check that several sequences cannot share one history, and that one sequence works."""
    ctx = kit.context(tmp_path)
    sequences = three(ctx)
    params = {"penalty_last_n": 8, "penalty_repeat": 2.0}
    for sampler in (NumpySampler(SamplerParams(**params)), ctx.model.sampler(**params)):
        ctx.step_all(sequences, [7, 8, 9])
        with pytest.raises(UsageError, match="has the history of one sequence"):
            sampler.sample_all(ctx)
        ctx.step_all(sequences[:1], [7])
        assert len(sampler.sample_all(ctx)) == 1
    with pytest.raises(UsageError, match="has the history"):
        ctx.advance(sequences, [7, 8, 9], 2, ctx.model.sampler(**params))


def test_advance_equals_a_loop_of_steps(tmp_path: Path) -> None:
    """Check tokens, ledgers and logits against the loop in Python."""
    ctx, other = kit.context(tmp_path), kit.context(tmp_path)
    sequences, singles = three(ctx), three(other)
    sampler, rows, tokens = other.model.sampler(), [], [7, 8, 9]
    for _ in range(6):
        other.step_all(singles, tokens)
        tokens = sampler.sample_all(other)
        rows.append(tokens)
    assert ctx.advance(sequences, [7, 8, 9], 6, ctx.model.sampler()) == rows
    assert [each.tokens for each in sequences] == [each.tokens for each in singles]
    assert np.array_equal(ctx.logits_all(), other.logits_all())
    assert np.array_equal(sequences[1].logits(), singles[1].logits())
    with pytest.raises(UsageError, match="steps must be a whole number from 1"):
        ctx.advance(sequences, rows[-1], 0, ctx.model.sampler())


def test_advance_keeps_steps_before_a_failure(tmp_path: Path) -> None:
    """Check a cache that becomes full during the call."""
    ctx = kit.context(tmp_path, n_ctx=16)
    sequences = three(ctx)
    with pytest.raises(NoKVSlot) as caught:
        ctx.advance(sequences, [7, 8, 9], 9, ctx.model.sampler())
    assert (caught.value.cause, caught.value.n_tokens) == ("full", 3)
    assert [len(each) for each in sequences] == [4, 5, 6]
    assert ctx.kv.stats.used == 15
    with pytest.raises(StaleLogits):
        ctx.logits()
    sequences[2].remove()
    ctx.step_all(sequences[:2], [1, 2])


def test_rows_in_another_order_are_copied() -> None:
    """Check the copy that is made where the library's rows are not in order."""
    results = []
    for defines in ((), ("FAKE_APART",)):
        native = Local(fake(*defines))
        model = native.model_load("fake.gguf", ModelParams())
        context = native.context_new(model, ContextParams(n_ctx=64, n_batch=8, n_seq_max=4))
        assert native.decode(context, [5, 6, 7], [0, 0, 0], None, (0, 1, 2), (1,) * 3) == 0
        rows = native.logits_all(context, 512)
        assert (rows.shape, rows.flags.writeable) == ((3, 512), False)
        results.append(rows.copy())
        assert np.array_equal(rows[1], native.logits(context, 1, 512))
        native.close()
    assert np.array_equal(*results)


def test_decode_of_several_sequences_releases_the_gil() -> None:
    """Check that a step ends that waits for work of another thread."""
    native = Local(fake())
    model = native.model_load("fake.gguf", ModelParams())
    context = native.context_new(model, ContextParams(n_ctx=64, n_batch=8, n_seq_max=4))
    ended, counted = threading.Event(), []

    def work() -> None:
        counted.extend(range(1000))
        # The decode may not have begun when the first cancel came.
        while not ended.wait(0.01):
            native.cancel(context)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert native.decode(context, [5, HANG], [0, 0], None, (0, 1), (1,) * 2) == 2
    finally:
        ended.set()
        thread.join(120)
    assert len(counted) == 1000
    native.close()


def test_numpy_sampler_continues_steps_without_a_native_sampler(tmp_path: Path) -> None:
    """Check that the loop works on builds that cannot sample."""
    ctx = kit.context(tmp_path, {"capabilities": ALL & ~Capability.SAMPLER})
    sequences, sampler = three(ctx), NumpySampler()
    ctx.step_all(sequences, [7, 8, 9])
    ctx.step_all(sequences, sampler.sample_all(ctx))
    assert [len(each) for each in sequences] == [3, 4, 5]


def test_defrag_policy_recovers_a_failed_step(tmp_path: Path) -> None:
    """Check that scattered cells are moved together, and the steps continue."""
    for many in (False, True):
        ctx = kit.context(tmp_path, n_ctx=16, defrag_policy="on_failure")
        a, b = ctx.sequence(), ctx.sequence()
        for _ in range(8):
            ctx.step_all([a, b], [5, 6])
        b.remove()
        c, d = ctx.sequence(), ctx.sequence()
        if many:
            assert len(ctx.advance([c, d], [7, 8], 3, ctx.model.sampler())) == 3
        else:
            ctx.step_all([c, d], [7, 8])
        assert (len(c), len(d)) == ((3, 3) if many else (1, 1))
        assert a.tokens == [5] * 8
        with pytest.raises(NoKVSlot):
            ctx.advance([c, d], [7, 8], 9, ctx.model.sampler())
        assert ctx.kv.stats.used == 16


def test_generation_continues_a_failed_loop(tmp_path: Path) -> None:
    """The token that was sampled last is the next one, for a sampler with a history."""
    large, small = kit.context(tmp_path), kit.context(tmp_path, n_ctx=8)
    chosen = large.advance([large.sequence()], [5], 8, large.model.sampler())
    a, b = small.sequence(), small.sequence()
    sampler = small.model.sampler()
    small.step_all([a, b], [5, 5])
    with pytest.raises(NoKVSlot):
        small.advance([a], chosen[0], 9, sampler)
    b.close()
    assert [[token] for token in a.tokens[1:]] == chosen[:6]
    assert sampler.take_ahead(a)[0] == chosen[6][0]
