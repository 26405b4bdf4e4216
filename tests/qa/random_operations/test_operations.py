"""Operations on contexts do what the protocol says, in this process and in a worker alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.build import MINUS, THROW
from fakes.opened import feed

from pyllamakv.binding.protocol import (
    ContextHandle,
    ModelHandle,
    Native,
    SamplerParams,
)
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import (
    Closed,
    NativeError,
    StateError,
)

pytest_plugins = ("fakes.opened",)


def ints(*values: int) -> Any:
    """Return an array as the protocol wants it."""
    return np.array(values, np.int32)


def test_decoding(native: Native, context: ContextHandle) -> None:
    """Batches, single tokens and their logits."""
    assert feed(native, context, 0, 5) == 0
    row = native.logits(context, -1, 512)
    assert (row.dtype, row.shape, row.flags.writeable) == (np.float32, (512,), False)
    assert int(row.argmax()) == 4 + 4 + 1
    assert native.decode_one(context, 7, 5, 0) == 0
    assert int(native.logits(context, 0, 512).argmax()) == 13
    logits = np.array([1, 0, 1], np.int8)
    assert native.decode(context, ints(1, 2, 3), ints(0, 1, 2), None, ints(1, 1, 1), logits) == 0
    assert int(native.logits(context, 0, 512).argmax()) == 2
    assert int(native.logits(context, 2, 512).argmax()) == 6
    for index in (1, 3, -3, 99):
        with pytest.raises(NativeError, match="there are none"):
            native.logits(context, index, 512)
    with pytest.raises(NativeError, match="vocabulary"):
        native.logits(context, 0, 513)


def test_one_token_of_each(native: Native, model: ModelHandle, context: ContextHandle) -> None:
    """Several sequences go on together, with a row of logits and a token for each."""
    for pos in range(2):
        assert native.decode_each(context, [1, 2, 3], [pos] * 3, (0, 1, 4)) == 0
        rows = native.logits_all(context, 512)
        assert (rows.dtype, rows.shape, rows.flags.writeable) == (np.float32, (3, 512), False)
        assert rows.argmax(axis=1).tolist() == [2 + pos, 3 + pos, 4 + pos]
    sampler = native.sampler_new(model, SamplerParams())
    assert native.sample_all(sampler, context, 3) == [3, 4, 5]
    assert native.sample_all(sampler, context, 9) == [3, 4, 5]
    code, rows = native.run(sampler, context, [3, 4], [2, 2], (0, 4), 2, True)
    assert (code, rows) == (0, [[6, 7], [10, 11]])
    assert native.seq_pos_max(context, 4) == 3
    # The fake takes 257 for the end; 503 would hang.
    assert native.run(sampler, context, [MINUS, 4], [4, 4], (0, 4), 2, True) == (-3, [])
    for wrong in (
        lambda: native.sample_all(sampler, context, 0),
        lambda: native.logits_all(context, 511),
    ):
        with pytest.raises(NativeError):
            wrong()
    with pytest.raises(ValueError, match=r"."):
        native.decode_each(context, [1], [0, 0], (0, 1))
    with pytest.raises(TypeError):
        native.decode_each(context, [1.5], [0], (0,))


def test_batches_with_several_sequences_per_token(native: Native, context: ContextHandle) -> None:
    """The flat list of sequences belongs to the tokens by their counts."""
    code = native.decode(context, ints(1, 2), ints(0, 1), ints(2, 1), ints(0, 3, 3), None)
    assert code == 0
    cells = native.cells(context, 0)
    assert cells.seqs[:2, 0].tolist() == [0b1001, 0b1000]


def test_arrays_of_another_kind(native: Native, context: ContextHandle) -> None:
    """What C cannot read in place is converted, not misread."""
    wide = np.arange(8, dtype=np.int64)[::2]
    if isinstance(native, Remote):
        wide = wide.astype(np.int32)[::1]
    assert native.decode(context, wide, wide, None, wide * 0, None) == 0
    assert native.cells(context, 0).pos[:4].tolist() == [0, 2, 4, 6]


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
def test_short_arrays_stay_out_of_c(native: Native, context: ContextHandle, arrays: Any) -> None:
    """An array that is too short is refused before C reads past its end."""
    with pytest.raises(NativeError, match="differ in length"):
        native.decode(context, *arrays)


def test_codes_of_decode(native: Native, context: ContextHandle) -> None:
    """llama_decode's own codes are returned, ours are raised."""
    assert feed(native, context, 0, 32) == 0
    assert feed(native, context, 1, 32, 100) == 0
    assert feed(native, context, 2, 16, 200) == 1
    native.clear(context, True)
    assert native.decode_one(context, MINUS, 0, 0) == -3
    with pytest.raises(NativeError, match="invalid token") as caught:
        native.decode_one(context, THROW, 0, 0)
    assert caught.value.code == -1003
    with pytest.raises(NativeError, match="n_tokens > n_batch"):
        feed(native, context, 0, 33)
    with pytest.raises(NativeError, match="invalid token"):
        native.decode_one(context, -5, 0, 0)


def test_sequences(native: Native, context: ContextHandle) -> None:
    """Sequence operations reach the cells."""
    feed(native, context, 0, 8)
    assert native.seq_rm(context, 0, 2, 4)
    assert not native.seq_rm(context, 62, 2, 4)
    native.seq_cp(context, 0, 1, -1, -1)
    native.seq_add(context, 1, 4, -1, 10)
    assert native.seq_pos_max(context, 1) == 17
    assert native.seq_pos_min(context, 1) == 0
    assert native.seq_pos_min(context, 5) == -1
    cells = native.cells(context, 0)
    assert cells.pos[:8].tolist() == [0, 1, -1, -1, 14, 15, 16, 17]
    assert cells.shift[:8].tolist() == [0, 0, 0, 0, 10, 10, 10, 10]
    assert cells.info.has_shift
    assert cells.info.used == 6
    native.seq_div(context, 1, 14, -1, 2)
    assert native.seq_pos_max(context, 1) == 8
    native.update(context)
    assert not native.cells(context, 0).info.has_shift
    native.seq_keep(context, 1)
    assert native.seq_pos_max(context, 0) == -1
    with pytest.raises(NativeError, match="divisor"):
        native.seq_div(context, 1, 0, -1, 0)


def test_defragmentation(native: Native, context: ContextHandle) -> None:
    """A defragmentation closes holes, and the report and the counters have the moves."""
    feed(native, context, 0, 8)
    native.seq_rm(context, 0, 2, 4)
    report = native.defrag(context)
    assert (report.cells, report.passes, report.ns) == (4, 1, 1000)
    assert native.cells(context, 0).pos[:7].tolist() == [0, 1, 4, 5, 6, 7, -1]
    counters = native.counters(context)
    assert (counters.defrags, counters.cells_moved) == (1, 4)
    with pytest.raises(NativeError, match="no such cache"):
        native.cells(context, 3)


def test_snapshots_do_not_change(native: Native, context: ContextHandle) -> None:
    """The arrays of a snapshot are its own."""
    feed(native, context, 0, 4)
    before = native.cells(context, 0)
    native.clear(context, True)
    assert before.pos[:4].tolist() == [0, 1, 2, 3]


def test_states(native: Native, context: ContextHandle) -> None:
    """A state is bytes; a refusal is 0; what is no state raises."""
    feed(native, context, 0, 6)
    state = native.state_save(context, 0)
    assert len(state) == 48
    assert native.state_load(context, 3, state) == 48
    assert native.seq_pos_max(context, 3) == 5
    assert native.state_save(context, 3) == state
    with pytest.raises(StateError, match="not a state"):
        native.state_load(context, 3, b"abc")
    assert native.state_load(context, 4, state * 20) == 0
    assert native.state_save(context, 7) == b""


def test_samplers(native: Native, model: ModelHandle, context: ContextHandle) -> None:
    """A sampler chooses from the logits of a place."""
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


def test_many(native: Native, context: ContextHandle) -> None:
    """Several operations go in one call, and the first error ends it."""
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("decode_one", (context, 1, 0, 0)),
        ("logits", (context, -1, 512)),
        ("cells", (context, 0)),
    ]
    code, row, cells = native.many(calls)
    assert code == 0
    assert int(row.argmax()) == 2
    assert cells.info.used == 1
    with pytest.raises(NativeError, match="invalid token"):
        native.many([("decode_one", (context, THROW, 0, 0)), *calls])
    assert native.seq_pos_max(context, 0) == 0
