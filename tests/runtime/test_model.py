"""Test a model's metadata, its tokens, and refused calls."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import adapter_kit
import pytest
import runtime_kit as kit
from fakes.tiny_gguf import write_gguf

from pyllamakv.binding import owner
from pyllamakv.errors import Closed, ModelError, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_model_info_is_read_from_file_and_library(tmp_path: Path) -> None:
    """Check path and metadata."""
    model = kit.model(tmp_path)
    assert model.path == tmp_path / "tiny.gguf"
    assert model.meta("general.name") == "simulated"
    assert model.meta("absent") is None
    assert model.file.architecture == "llama"


def test_text_becomes_tokens_and_back(tmp_path: Path) -> None:
    """Check characters of several bytes, lone surrogates and special tokens."""
    model = kit.model(tmp_path)
    for text in ("", "plain", "Grüße 😀"):
        tokens = model.tokenize(text)
        assert tokens[0] == 1
        assert model.detokenize(tokens) == text
    assert model.tokenize("a", add_special=False) == [100]
    assert model.detokenize(model.tokenize("\ud83d")) == "\ufffd"
    assert model.piece(2) == b""
    assert model.piece(2, special=True) == b"</s>"
    assert model.is_eog(2)
    assert not model.is_eog(5)
    with pytest.raises(UsageError, match="text must be text"):
        model.tokenize(b"bytes")


def test_tokens_out_of_range_are_refused(tmp_path: Path) -> None:
    """Check every call that takes a token."""
    model = kit.model(tmp_path)
    for token in (-1, 259):
        for attempt in (model.piece, model.is_eog, lambda t: model.detokenize([t])):
            with pytest.raises(UsageError, match="out of range"):
                attempt(token)


def test_a_model_without_vocabulary_takes_tokens_only(tmp_path: Path) -> None:
    """Check that text is refused and decoding works."""
    model = kit.model(tmp_path)
    model.info = dataclasses.replace(model.info, has_vocab=False)
    for attempt in (lambda: model.tokenize("a"), lambda: model.piece(5)):
        with pytest.raises(Unsupported, match="no vocabulary"):
            attempt()
    ctx = model.context(n_ctx=16)
    a = ctx.sequence()
    ctx.decode(a.feed([5]))


def test_files_are_checked_before_the_library_sees_them(tmp_path: Path) -> None:
    """Check a damaged file, a missing one, and one that only the library can refuse."""
    opened = kit.library()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF"):
        opened.load_model(bad)
    with pytest.raises(ModelError, match="no model file"):
        opened.load_model(tmp_path / "absent.gguf")
    strange = write_gguf(tmp_path / "refused.gguf", architecture="strange")
    with pytest.raises(
        ModelError, match=r"unknown model architecture \(architecture 'strange'\)"
    ) as caught:
        opened.load_model(strange)
    assert caught.value.architecture == "strange"
    assert opened.load_model(str(write_gguf(tmp_path / "tiny.gguf"))).info.n_layer == 2


@pytest.mark.parametrize("layers", [-1, 2**31])
def test_negative_number_of_gpu_layers_is_refused(tmp_path: Path, layers: int) -> None:
    """-1 means all layers in later releases and none in earlier ones, so it is resolved here."""
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=f"n_gpu_layers must be 0 or more, not {layers}"):
        kit.library().load_model(path, n_gpu_layers=layers)


def test_a_closed_model_is_refused(tmp_path: Path) -> None:
    """Check every call after the end."""
    model = kit.model(tmp_path)
    assert repr(model) == "<Model tiny.gguf>"
    with model:
        pass
    model.close()
    assert model.closed
    assert repr(model) == "<Model tiny.gguf, closed>"
    for attempt in (
        model.context,
        lambda: model.tokenize("a"),
        lambda: model.piece(5),
        lambda: model.is_eog(5),
        lambda: model.meta("x"),
        model.__enter__,
    ):
        with pytest.raises(Closed):
            attempt()


@pytest.mark.parametrize("what", ["model", "adapter", "context", "adapted context", "sampler"])
def test_creation_interrupted_after_its_call_of_c_frees_the_object(
    what: str, tmp_path: Path
) -> None:
    """Ctrl-C in any later call, or before the first one, leaves no object."""
    file = adapter_kit.AdapterFile().write(tmp_path / "one.gguf")
    model = adapter_kit.simulated_model(tmp_path)
    adapter, native = model.load_adapter(file), model.native
    library = kit.library()
    makes: dict[str, Callable[[], Any]] = {
        "model": lambda: library.load_model(write_gguf(tmp_path / "tiny.gguf")),
        "adapter": lambda: model.load_adapter(file),
        "context": lambda: model.context(64, n_seq_max=2),
        "adapted context": lambda: model.context(64, n_seq_max=2, adapters={adapter: 1.0}),
        "sampler": model.sampler,
    }
    used: Any = library.native if what == "model" else native
    before = set(used._objects)
    later = ("model_info", "context_info", "adapters_set", "update", "cells")
    for number in itertools.count(1):
        with kit.interrupted(used, later, number) as calls:
            try:
                made = makes[what]()
            except KeyboardInterrupt:
                assert set(used._objects) == before, f"interrupted in {calls[-1]}"
                continue
        made.close()
        break
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.weakref, "finalize", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            makes[what]()
    assert set(used._objects) == before
