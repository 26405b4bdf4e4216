"""Test libraries, models, contexts and logs, in this process and in a worker."""

from __future__ import annotations

import itertools
import logging
import os
from unittest.mock import Mock

import numpy as np
import pytest
from fakes.build import FLOOD, LOG, THROW, fake

from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import (
    Backing,
    Capability,
    ContextHandle,
    ContextParams,
    Device,
    MemoryType,
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
    Unsupported,
)

pytest_plugins = ("fakes.opened",)


def test_library_reports_its_interface_and_capabilities(native: Native) -> None:
    """A library reports its version, build and capabilities."""
    assert native.about.abi == 1
    assert native.about.variant == "fake"
    assert Capability.CELLS in native.about.capabilities
    assert Capability.SWA not in native.about.capabilities
    assert native.about.probes == {"load": "fake", "devices": None}
    assert native.devices() == [Device("FAKE", "a device of no use", "cpu", 1 << 20, 1 << 21)]


def test_model_reports_its_metadata_and_tokens(native: Native, model: ModelHandle) -> None:
    """All properties of a model can be read."""
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


def test_failed_model_load_has_code_text_and_log(native: Native) -> None:
    """The error has the code, the library's text and its last log lines."""
    with pytest.raises(ModelError, match="no such file") as caught:
        native.model_load("/somewhere/missing.gguf", ModelParams(rpc_servers="a:1", devices="x"))
    assert caught.value.code == -1005
    assert caught.value.log[-1] == "fake: cannot open /somewhere/missing.gguf"


def test_context_reports_its_sizes(
    native: Native, model: ModelHandle, context: ContextHandle
) -> None:
    """A context reports its sizes; None means that the build does not report a value."""
    info = native.context_info(context)
    assert (info.n_ctx, info.n_batch, info.memory) == (64, 32, MemoryType.ATTENTION)
    assert info.can_remove_partly is None
    assert info.contiguous_slots is True
    assert info.flash_attn is False
    assert (info.n_swa, info.n_streams) == (0, 1)
    native.threads(context, 2, 3)
    with pytest.raises(NativeError, match="n_threads"):
        native.threads(context, 0, 0)
    with pytest.raises(ContextError, match="n_ctx is 0"):
        native.context_new(model, ContextParams(n_ctx=0))
    with pytest.raises(NotEnoughMemory, match="smaller"):
        native.context_new(model, ContextParams(n_ctx=1 << 30))


@pytest.mark.parametrize("kind", [Local, Remote])
def test_missing_capabilities_raise_unsupported(kind: type[Local | Remote]) -> None:
    """A missing capability raises Unsupported with its name."""
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


def test_use_of_a_freed_object_is_refused_in_any_order(native: Native) -> None:
    """Objects may be freed in any order, and using a freed one raises an error."""
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
            lambda: native.decode(context, [1], [0], None, (0,), None),  # noqa: B023
            lambda: native.cells(context, 0),  # noqa: B023
            lambda: native.sample(sampler, context, 0),  # noqa: B023
        ):
            with pytest.raises(Closed):
                call()
    model = native.model_load("m", ModelParams())
    assert native.model_meta(model, "fake.alive") == "1"


def test_close_frees_everything() -> None:
    """The library has no object left."""
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


def test_input_embeddings_reach_c_by_rows(
    native: Native, model: ModelHandle, context: ContextHandle
) -> None:
    """Embeddings and their positions reach C row by row; a guarded context refuses them."""
    # Neither array is contiguous: C must get a copy.
    embd = np.asfortranarray([[7.0, 8.0, 97.0]], np.float32)[:, ::-1][:, ::-1]
    pos = np.array([[3, 0], [4, 0], [5, 0], [6, 0]], np.int32)[:, :1]
    one = np.array([1], np.int32)
    with pytest.raises(Unsupported, match="guarded"):
        native.decode(context, embd, pos, None, one, None)
    free = native.context_new(model, ContextParams(n_ctx=16, n_batch=8, guard=False))
    assert native.decode(free, embd, pos, None, one, None) == 0
    assert native.seq_pos_max(free, 1) == 3 + 6
    assert int(native.logits(free, 0, 512).argmax()) == (97 + 9 + 1) % 256
    for places in (pos.repeat(2, 1), pos[0]):
        with pytest.raises(NativeError, match="differ in length"):
            native.decode(free, embd, places, None, one, None)
    with pytest.raises(NativeError, match="wrong shape"):
        native.decode(free, embd, pos[:1], None, one, None)
    # The batch of a context is reused: nothing of the embeddings may stay in it.
    assert native.decode(free, one, 9 + one, None, one, None) == 0
    assert int(native.logits(free, 0, 512).argmax()) == 1 + 10 + 1


def test_log_lines_reach_logging_by_level(
    native: Native, context: ContextHandle, caplog: pytest.LogCaptureFixture
) -> None:
    """Log lines are sent to `logging` by level, once per reader."""
    caplog.set_level(logging.DEBUG, "pyllamakv.native")
    assert (2, "fake: loaded fake.gguf") in native.logs()
    assert native.logs() == []
    native.decode(context, [LOG], [0], None, (0,), None)
    assert native.logs() == [(3, "fake: warned")]
    found = [r for r in caplog.records if r.name == "pyllamakv.native"]
    assert [(r.levelno, r.getMessage()) for r in found] == [(logging.WARNING, "fake: warned")]
    native.log_level(4)
    native.decode(context, [LOG], [1], None, (0,), None)
    assert native.logs() == []
    native.log_level(2)


def test_lost_lines_of_the_log_are_counted(native: Native, context: ContextHandle) -> None:
    """A ring buffer that overflowed reports the number of lost lines."""
    native.logs()
    native.decode(context, [FLOOD], [0], None, (0,), None)
    lines = native.logs()
    assert lines[-1][0] == 3
    assert "36 lines of the log were lost" in lines[-1][1]
    assert lines[-2] == (2, "fake: line 99")
    assert native.logs() == []


def test_log_lines_of_an_error_stay_readable(native: Native, context: ContextHandle) -> None:
    """The next reader of the log still gets the lines of an error."""
    native.logs()
    native.decode(context, [LOG], [0], None, (0,), None)
    with pytest.raises(NativeError) as caught:
        native.decode(context, [THROW], [1], None, (0,), None)
    assert caught.value.log[-1] == "fake: warned"
    assert native.logs() == [(3, "fake: warned")]


def test_mapped_memory_is_read_trimmed_and_flushed(
    native: Native, model: ModelHandle, context: ContextHandle
) -> None:
    """Mapped memory is measured, released and flushed; on the heap this is refused."""
    with pytest.raises(Unsupported, match="heap") as refused:
        native.mapping(context)
    assert refused.value.capability == "mapping"
    with pytest.raises(Unsupported):
        native.mapping_trim(context)
    params = ContextParams(n_ctx=8, n_batch=8, kv_backing=3, kv_path="file", kv_keep=1)
    kept = native.context_new(model, params)
    found = native.mapping(kept)
    assert (found.info.kind, found.info.kept, found.info.resumed) == (Backing.FILE, True, False)
    assert found.rows.tolist() == [[0, 3, 0, 4096, 4096], [0, 3, 1, 4096, 0]]
    assert native.mapping_trim(kept) == 4096
    tokens = np.arange(8, dtype=np.int32)
    native.mapping_flush(kept, tokens)
    assert native.mapping_tokens(kept).tolist() == tokens.tolist()
    with pytest.raises(NativeError, match="as many"):
        native.mapping_flush(kept, tokens[:3])


CREATIONS = {
    "model": lambda native, model: native.model_load("fake.gguf", ModelParams()),
    "context": lambda native, model: native.context_new(model, ContextParams()),
    "sampler": lambda native, model: native.sampler_new(model, SamplerParams()),
    "adapter": lambda native, model: native.adapter_load(model, "fake.gguf", 1),
}


@pytest.mark.parametrize("what", CREATIONS)
def test_creation_that_a_signal_interrupts_frees_the_object(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises the exception of a handler directly after the C call, or in a later call."""
    native = Local(fake())
    model = native.model_load("fake.gguf", ModelParams())
    library, objects = native._lib, Mock(wraps=native._lib)
    name = {"model": "plk_model_load", "adapter": "plk_adapter_load"}.get(what, f"plk_{what}_new")

    def interrupted(*arguments: object) -> int:
        assert getattr(library, name)(*arguments) == 0
        raise KeyboardInterrupt

    getattr(objects, name).side_effect = interrupted
    monkeypatch.setattr(native, "_lib", objects)
    with pytest.raises(KeyboardInterrupt):
        CREATIONS[what](native, model)
    assert getattr(objects, f"plk_{what}_free").call_count == 1
    tables = native._models, native._contexts, native._scratch, native._samplers, native._adapters
    assert [len(table) for table in tables] == [1, 0, 0, 0, 0]
    native.close()


def test_context_in_mapped_memory_is_closed_in_a_forked_child() -> None:
    """Closing it normally would write into memory of its parent and flush the file."""
    native = Local(fake())
    model = native.model_load("fake.gguf", ModelParams())
    heap = native.context_new(model, ContextParams())
    mapped = native.context_new(model, ContextParams(kv_backing=Backing.ANONYMOUS))
    pid = os.fork()
    if not pid:
        status = 1
        try:
            native.seq_pos_max(heap, 0)
            with pytest.raises(Closed):
                native.seq_pos_max(mapped, 0)
            native.context_free(mapped)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert native.seq_pos_max(mapped, 0) == -1
    native.close()
