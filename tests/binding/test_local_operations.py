"""Test that operations pass arguments and results, in this process and in a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakes.build import FULL, MINUS, THROW
from fakes.opened import feed

from pyllamakv.binding.protocol import (
    CellsInfo,
    ContextHandle,
    ContextParams,
    Counters,
    ModelHandle,
    Native,
    RawDefrag,
    SamplerParams,
)
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import (
    Closed,
    NativeError,
    StateError,
)

pytest_plugins = ("fakes.opened",)

Calls = Callable[[], list[str]]


@pytest.fixture
def calls(native: Native) -> Iterator[Calls]:
    """Return a function that returns the C calls since its last call."""
    native.log_level(1)
    native.logs()
    yield lambda: [text for _level, text in native.logs()]
    native.log_level(2)  # the level that the library starts with


def ints(*values: int) -> Any:
    """Return an array of the protocol's type."""
    return np.array(values, np.int32)


def test_decoded_batches_have_logits_where_requested(
    native: Native, context: ContextHandle
) -> None:
    """Check batches, single tokens and their logits."""
    assert feed(native, context, 0, 5) == 0
    row = native.logits(context, -1, 512)
    assert (row.dtype, row.shape, row.flags.writeable) == (np.float32, (512,), False)
    assert int(row.argmax()) == 4 + 4 + 1
    assert native.decode(context, [7], [5], None, (0,), None) == 0
    assert int(native.logits(context, 0, 512).argmax()) == 13
    logits = np.array([1, 0, 1], np.int8)
    assert native.decode(context, ints(1, 2, 3), ints(0, 1, 2), None, ints(1, 1, 1), logits) == 0
    assert int(native.logits(context, 0, 512).argmax()) == 2
    assert int(native.logits(context, 2, 512).argmax()) == 6
    for index in (1, 3, -3, 99):
        with pytest.raises(NativeError, match="there are none"):
            native.logits(context, index, 512)
    for flags, places in (((1, 0), [0]), ((0, 1), [1]), (None, [1]), ((1, 1), [0, 1])):
        assert native.decode(context, [1, 2], [3, 4], None, (1, 2), flags) == 0
        rows = native.logits_all(context, 512)
        assert rows.argmax(axis=1).tolist() == [(5, 7)[place] for place in places]
    with pytest.raises(NativeError, match="vocabulary"):
        native.logits(context, 0, 513)


def test_ids_and_flags_are_copied_again_after_a_copy_that_failed(
    native: Native, context: ContextHandle, calls: Calls
) -> None:
    """If copying ids fails, later decodes do not use the partial copy."""
    ids, flags = (0, 1), (1, 1)
    assert native.decode(context, [1, 2], [0, 0], None, ids, flags) == 0
    for wrong in (((2, 2**40), flags), (ids, (0, "x"))):
        with pytest.raises((OverflowError, TypeError)):
            native.decode(context, [1, 2], [1, 1], None, *wrong)
        calls()
        assert native.decode(context, [1, 2], [1, 1], None, ids, flags) == 0
        assert calls() == ["token 1 at 1 of 0", "token 2 at 1 of 1"]
        assert len(native.logits_all(context, 512)) == 2


def test_one_token_per_sequence_is_decoded_together(
    native: Native, model: ModelHandle, context: ContextHandle
) -> None:
    """Several sequences are decoded together, with a row of logits and a token for each."""
    for pos in range(2):
        assert native.decode(context, [1, 2, 3], [pos] * 3, None, (0, 1, 4), (1,) * 3) == 0
        rows = native.logits_all(context, 512)
        assert (rows.dtype, rows.shape, rows.flags.writeable) == (np.float32, (3, 512), False)
        assert rows.argmax(axis=1).tolist() == [2 + pos, 3 + pos, 4 + pos]
    sampler = native.sampler_new(model, SamplerParams())
    assert native.sample_all(sampler, context, 3) == [3, 4, 5]
    assert native.sample_all(sampler, context, 9) == [3, 4, 5]
    code, rows = native.run(sampler, context, [3, 4], [2, 2], (0, 4), 2, True)
    assert (code, rows) == (0, [[6, 7], [10, 11]])
    assert native.seq_pos_max(context, 4) == 3
    # The fake library treats 257 as the end token; 503 would hang.
    assert native.run(sampler, context, [MINUS, 4], [4, 4], (0, 4), 2, True) == (-3, [])
    for wrong in (
        lambda: native.sample_all(sampler, context, 0),
        lambda: native.logits_all(context, 511),
    ):
        with pytest.raises(NativeError):
            wrong()
    with pytest.raises(ValueError, match=r"."):
        native.decode(context, [1], [0, 0], None, (0, 1), (1,) * 2)
    with pytest.raises(TypeError):
        native.decode(context, [1.5], [0], None, (0,), None)


def test_sequences_of_a_token_are_assigned_by_count(
    native: Native, context: ContextHandle, calls: Calls
) -> None:
    """The flat list of sequences is assigned to tokens by their counts."""
    code = native.decode(context, ints(1, 2), ints(0, 1), ints(2, 1), ints(0, 3, 3), None)
    assert code == 0
    assert calls() == ["token 1 at 0 of 0+3", "token 2 at 1 of 3"]


def test_arrays_of_another_type_are_converted(
    native: Native, context: ContextHandle, calls: Calls
) -> None:
    """Arrays that C cannot read in place are converted."""
    wide = np.arange(8, dtype=np.int64)[::2]
    if isinstance(native, Remote):
        wide = wide.astype(np.int32)[::1]
    assert native.decode(context, wide + 40, wide, None, wide + 1, None) == 0
    assert calls() == [f"token {40 + n} at {n} of {n + 1}" for n in (0, 2, 4, 6)]


@pytest.mark.parametrize(
    "arrays",
    [
        (ints(1, 2), ints(0), None, ints(0, 0), None),
        (ints(1, 2), ints(0, 1), None, ints(0), None),
        (ints(1, 2), ints(0, 1), ints(1), ints(0, 0), None),
        (ints(1, 2), ints(0, 1), ints(2, 2), ints(0, 0), None),
        (ints(1, 2), ints(0, 1), None, ints(0, 0), np.zeros(1, np.int8)),
    ],
)
def test_too_short_arrays_are_refused(native: Native, context: ContextHandle, arrays: Any) -> None:
    """An array that is too short is refused before C reads beyond its end."""
    with pytest.raises(NativeError, match="differ in length"):
        native.decode(context, *arrays)


def test_decode_returns_llama_codes_and_raises_own_codes(
    native: Native, context: ContextHandle
) -> None:
    """llama_decode's codes are returned; those of the shim are raised."""
    assert native.decode(context, [FULL], [0], None, (0,), None) == 1
    assert native.decode(context, [MINUS], [0], None, (0,), None) == -3
    with pytest.raises(NativeError, match="invalid token") as caught:
        native.decode(context, [THROW], [0], None, (0,), None)
    assert caught.value.code == -1003
    with pytest.raises(NativeError, match="n_tokens > n_batch"):
        feed(native, context, 0, 33)
    with pytest.raises(NativeError, match="invalid token"):
        native.decode(context, [-5], [0], None, (0,), None)


def test_operations_on_sequences_pass_their_arguments(
    native: Native, context: ContextHandle, calls: Calls
) -> None:
    """Arguments are passed in the right order, and a refusal by C is False or an error."""
    assert native.seq_rm(context, 1, 2, 4)
    native.seq_cp(context, 1, 2, -1, 3)
    native.seq_keep(context, 5)
    native.seq_add(context, 1, 4, -1, -10)
    native.seq_div(context, 1, 14, -1, 2)
    native.update(context)
    native.clear(context, True)
    native.clear(context, False)
    assert calls() == [
        "seq_rm 1 2 4", "seq_cp 1 2 -1 3", "seq_keep 5", "seq_add 1 4 -1 -10",
        "seq_div 1 14 -1 2", "update", "clear 1", "clear 0",
    ]  # fmt: skip
    assert not native.seq_rm(context, 62, 2, 4)
    with pytest.raises(NativeError, match="divisor"):
        native.seq_div(context, 1, 0, -1, 0)
    assert native.seq_pos_min(context, 5) == native.seq_pos_max(context, 5) == -1
    feed(native, context, 5, 8)
    assert (native.seq_pos_min(context, 5), native.seq_pos_max(context, 5)) == (105, 7)


def test_cache_reports_keep_the_fields_of_c(native: Native, context: ContextHandle) -> None:
    """Every field of a report is that of C, in order; 64-bit numbers are complete."""
    assert native.defrag(context) == RawDefrag(1, 2, 3, 4, 5, 6, 7, 8)
    assert native.counters(context) == Counters(*range(1, 12))
    info = CellsInfo(3, True, 64, 4, 5, True, 6, 7, 8, False, 1, 10, 11)
    assert native.cells(context, 0).info == info
    with pytest.raises(NativeError, match="no such cache"):
        native.cells(context, 3)


@pytest.mark.parametrize("n_seq_max", [8, 65])
def test_snapshots_have_a_row_per_cell_and_do_not_change(
    native: Native, model: ModelHandle, n_seq_max: int
) -> None:
    """The arrays are those that C wrote; a later snapshot has its own."""
    context = native.context_new(model, ContextParams(n_ctx=16, n_seq_max=n_seq_max))
    places, words = np.arange(16), (n_seq_max + 63) // 64
    first, second = native.cells(context, 0), native.cells(context, 0)
    assert (first.pos == places).all() and (second.pos == places + 1).all()
    for raw in (first, second):
        assert (raw.shift == -places).all()
        assert raw.seqs.tolist() == [[n << 32 * word for word in range(words)] for n in range(16)]


def test_states_are_unchanged_and_refusals_return_zero(
    native: Native, context: ContextHandle, calls: Calls
) -> None:
    """A state is bytes; a refusal is 0; an invalid state raises an error."""
    assert native.state_save(context, 7) == b""
    state = bytes(range(48))
    assert native.state_load(context, 3, state) == 48
    assert native.state_save(context, 5) == state
    assert calls() == ["state_save 7", "state_load 3", "state_save 5"]
    with pytest.raises(StateError, match="not a state"):
        native.state_load(context, 3, b"abc")
    assert native.state_load(context, 4, state * 20) == 0


def test_sampler_chooses_from_the_logits_of_a_place(
    native: Native, model: ModelHandle, context: ContextHandle
) -> None:
    """The chosen token is that of the logits at the given index."""
    sampler = native.sampler_new(model, SamplerParams(seed=3))
    feed(native, context, 0, 5)
    assert native.sample(sampler, context, -1) == 9
    native.sampler_reset(sampler)
    with pytest.raises(NativeError, match="no logits"):
        native.sample(sampler, context, 3)
    native.sampler_free(sampler)
    native.sampler_free(sampler)
    with pytest.raises(Closed, match="sampler"):
        native.sampler_reset(sampler)


def test_many_operations_end_at_the_first_error(native: Native, context: ContextHandle) -> None:
    """Several operations are made in one call, and the first error ends it."""
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("decode", (context, [1], [0], None, (0,), None)),
        ("logits", (context, -1, 512)),
        ("cells", (context, 0)),
    ]
    code, row, cells = native.many(calls)
    assert code == 0
    assert int(row.argmax()) == 2
    assert cells.info.used == 4
    with pytest.raises(NativeError, match="invalid token"):
        native.many([("decode", (context, [THROW], [0], None, (0,), None)), *calls])
    assert native.seq_pos_max(context, 0) == 0
