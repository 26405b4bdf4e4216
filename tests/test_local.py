"""The operations do what the protocol says, in this process and in a worker alike."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes.build import FLOOD, HANG, LOG, MINUS, SLOW, THROW, fake

from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import (
    Capability,
    ContextHandle,
    ContextParams,
    Device,
    Memory,
    ModelHandle,
    ModelParams,
    Native,
    SamplerParams,
)
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import (
    Closed,
    ContextError,
    ModelError,
    NativeError,
    NotEnoughMemory,
    StateError,
    Unsupported,
)


@pytest.fixture(params=[Local, Remote], ids=["local", "remote"])
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    """Open the fake library in this process, then in a worker."""
    opened = request.param(fake())
    yield opened
    opened.close()


@pytest.fixture
def model(native: Native) -> ModelHandle:
    """Load the fake model."""
    return native.model_load("fake.gguf", ModelParams())


@pytest.fixture
def context(native: Native, model: ModelHandle) -> ContextHandle:
    """Make a context of 64 cells."""
    params = ContextParams(n_ctx=64, n_batch=32, n_ubatch=16, n_seq_max=8)
    return native.context_new(model, params)


def ints(*values: int) -> Any:
    """Return an array as the protocol wants it."""
    return np.array(values, np.int32)


def feed(native: Native, context: ContextHandle, seq: int, n: int, start: int = 0) -> int:
    """Decode n tokens of one sequence."""
    pos = np.arange(start, start + n, dtype=np.int32)
    return native.decode(context, pos, pos, None, np.full(n, seq, np.int32), None)


def test_about(native: Native) -> None:
    """A library says what it is."""
    assert native.about.abi == 1
    assert native.about.variant == "fake"
    assert Capability.CELLS in native.about.capabilities
    assert Capability.SWA not in native.about.capabilities
    assert native.about.probes == {"load": "fake", "devices": None}
    assert native.devices() == [Device("FAKE", "a device of no use", "cpu", 1 << 20, 1 << 21)]


def test_models(native: Native, model: ModelHandle) -> None:
    """Everything about a model can be read."""
    info = native.model_info(model)
    assert (info.n_vocab, info.has_vocab, info.token_eot) == (512, True, -1)
    assert info.n_bytes == 1040384
    assert native.model_meta(model, "general.name") == "fake"
    assert native.model_meta(model, "no.such") is None
    assert native.model_meta(model, "fake.long") == "7".zfill(5000)
    assert native.tokenize(model, b"ab\0c", True, False) == [256, 97, 98, 0, 99]
    assert native.tokenize(model, b"", False, False) == []
    assert native.token_piece(model, 97, False) == b"a"
    assert native.token_piece(model, 0, False) == b"\0"
    assert len(native.token_piece(model, 511, False)) == 300
    assert native.token_is_eog(model, 257)
    assert not native.token_is_eog(model, 1)
    with pytest.raises(ModelError, match="no such token"):
        native.token_piece(model, 9999, False)


def test_models_that_cannot_be_loaded(native: Native) -> None:
    """The error carries the code, the library's text and its last lines."""
    with pytest.raises(ModelError, match="no such file") as caught:
        native.model_load("/somewhere/missing.gguf", ModelParams(rpc_servers="a:1", devices="x"))
    assert caught.value.code == -1005
    assert caught.value.log[-1] == "fake: cannot open /somewhere/missing.gguf"


def test_contexts(native: Native, model: ModelHandle, context: ContextHandle) -> None:
    """A context says how it was made; None is what the build cannot tell."""
    info = native.context_info(context)
    assert (info.n_ctx, info.n_batch, info.memory) == (64, 32, Memory.ATTENTION)
    assert info.can_remove_partly is None
    assert info.contiguous_slots is True
    assert info.flash_attn is False
    native.threads(context, 2, 3)
    with pytest.raises(NativeError, match="n_threads"):
        native.threads(context, 0, 0)
    with pytest.raises(ContextError, match="n_ctx is 0"):
        native.context_new(model, ContextParams(n_ctx=0))
    with pytest.raises(NotEnoughMemory, match="smaller"):
        native.context_new(model, ContextParams(n_ctx=1 << 30))


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
    """Holes go, and the report and the counters tell what moved."""
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


@pytest.mark.parametrize("kind", [Local, Remote])
def test_missing_capabilities(kind: type[Local | Remote]) -> None:
    """What a build cannot do is Unsupported, with its name."""
    native = kind(fake("FAKE_CAPABILITIES=0"))
    try:
        model = native.model_load("m", ModelParams())
        context = native.context_new(model, ContextParams())
        for call, name in (
            (lambda: native.defrag(context), "defrag"),
            (lambda: native.cells(context, 0), "cells"),
            (lambda: native.counters(context), "counters"),
        ):
            with pytest.raises(Unsupported) as caught:
                call()
            assert caught.value.capability == name
    finally:
        native.close()


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


def test_cancel_after(native: Native, context: ContextHandle) -> None:
    """An abort at a chosen poll ends a decode with 2."""
    native.cancel_after(context, 3)
    assert feed(native, context, 0, 8) == 2
    assert native.cancel_polls(context) == 4
    native.cancel_after(context, -1)
    assert feed(native, context, 0, 8) == 0


def test_cancel_from_another_thread(native: Native, context: ContextHandle) -> None:
    """A decode that never ends by itself ends when another thread says so."""
    done = threading.Event()

    def cancel() -> None:
        while not done.is_set():
            native.cancel(context)
            time.sleep(0.01)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        assert native.decode_one(context, HANG, 0, 0) == 2
    finally:
        done.set()
        thread.join(120)


def test_the_gil_is_released(native: Native, context: ContextHandle) -> None:
    """Other threads run while C works: the cancel of a hanging decode could not come otherwise."""
    started, counted = threading.Event(), itertools.count()

    def count() -> None:
        started.wait(120)
        for _ in range(1000):
            next(counted)
        native.cancel(context)
        # The decode may not have begun when the first cancel came.
        while not ended.wait(0.01):
            native.cancel(context)

    ended = threading.Event()
    thread = threading.Thread(target=count)
    thread.start()
    started.set()
    assert native.decode_one(context, HANG, 0, 0) == 2
    ended.set()
    thread.join(120)
    assert next(counted) == 1000


def test_use_after_free_in_any_order(native: Native) -> None:
    """Every order of frees is safe, and what is gone says so."""
    for order in itertools.permutations(("model", "context", "sampler")):
        model = native.model_load("m", ModelParams())
        context = native.context_new(model, ContextParams())
        sampler = native.sampler_new(model, SamplerParams())
        for what in order:
            if what == "model":
                native.model_free(model)
            elif what == "context":
                native.context_free(context)
            else:
                native.sampler_free(sampler)
        for call in (
            lambda: native.model_info(model),  # noqa: B023
            lambda: native.context_new(model, ContextParams()),  # noqa: B023
            lambda: native.decode_one(context, 1, 0, 0),  # noqa: B023
            lambda: native.cells(context, 0),  # noqa: B023
            lambda: native.sample(sampler, context, 0),  # noqa: B023
        ):
            with pytest.raises(Closed):
                call()
    model = native.model_load("m", ModelParams())
    assert native.model_meta(model, "fake.alive") == "1"


def test_close_frees_everything() -> None:
    """Nothing stays behind in the library."""
    native = Local(fake('FAKE_VARIANT="other"'))
    model = native.model_load("m", ModelParams())
    native.context_new(model, ContextParams())
    native.sampler_new(model, SamplerParams())
    native.close()
    native.close()
    again = Local(fake('FAKE_VARIANT="other"'))
    model = again.model_load("m", ModelParams())
    assert again.model_meta(model, "fake.alive") == "1"
    again.close()


def test_logs(native: Native, context: ContextHandle, caplog: pytest.LogCaptureFixture) -> None:
    """Lines go to logging by level, and to whoever asks, once."""
    caplog.set_level(logging.DEBUG, "pyllamakv.native")
    assert (2, "fake: loaded fake.gguf") in native.logs()
    assert native.logs() == []
    native.decode_one(context, LOG, 0, 0)
    assert native.logs() == [(3, "fake: warned")]
    found = [r for r in caplog.records if r.name == "pyllamakv.native"]
    assert [(r.levelno, r.getMessage()) for r in found] == [(logging.WARNING, "fake: warned")]
    native.log_level(4)
    native.decode_one(context, LOG, 1, 0)
    assert native.logs() == []
    native.log_level(2)


def test_lost_lines_are_told(native: Native, context: ContextHandle) -> None:
    """A ring that ran over says how much is missing."""
    native.logs()
    native.decode_one(context, FLOOD, 0, 0)
    lines = native.logs()
    assert lines[-1][0] == 3
    assert "36 lines of the log were lost" in lines[-1][1]
    assert lines[-2] == (2, "fake: line 99")
    assert native.logs() == []


def test_lines_survive_an_error(native: Native, context: ContextHandle) -> None:
    """What an error carries is still there for the next reader of the log."""
    native.logs()
    native.decode_one(context, LOG, 0, 0)
    with pytest.raises(NativeError) as caught:
        native.decode_one(context, THROW, 1, 0)
    assert caught.value.log[-1] == "fake: warned"
    assert native.logs() == [(3, "fake: warned")]


def test_many(native: Native, context: ContextHandle) -> None:
    """Several operations go in one call, and the first error ends it."""
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("decode_one", (context, 1, 0, 0)),
        ("logits", (context, -1, 512)),
        ("cells", (context, 0)),
    ]
    code, row, cells = native.many(calls)  # type: ignore[attr-defined]
    assert code == 0
    assert int(row.argmax()) == 2
    assert cells.info.used == 1
    with pytest.raises(NativeError, match="invalid token"):
        native.many([("decode_one", (context, THROW, 0, 0)), *calls])  # type: ignore[attr-defined]
    assert native.seq_pos_max(context, 0) == 0


def test_two_contexts_in_two_threads(native: Native, model: ModelHandle) -> None:
    """Different contexts may be at work at the same time."""
    contexts = [native.context_new(model, ContextParams()) for _ in range(4)]
    codes: list[int] = []

    def work(context: ContextHandle) -> None:
        codes.extend(native.decode_one(context, SLOW, pos, 0) for pos in range(3))

    threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == [0] * 12
