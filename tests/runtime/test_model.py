"""Test a model's facts, its tokens, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import runtime_kit as kit
from fakes.tiny_gguf import write_gguf

from pyllamakv.errors import Closed, ModelError, Unsupported, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_facts_come_from_file_and_library(tmp_path: Path) -> None:
    """Check path, metadata and the fingerprint."""
    model, again = kit.model(tmp_path), kit.model(tmp_path)
    assert model.path == tmp_path / "tiny.gguf"
    assert model.meta("general.name") == "simulated"
    assert model.meta("absent") is None
    assert model.file.architecture == "llama"
    assert model.fingerprint == again.fingerprint
    other = kit.library().load_model(write_gguf(tmp_path / "o.gguf", architecture="qwen2"))
    assert other.fingerprint != model.fingerprint


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
    """Check everything that takes a token."""
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
    with pytest.raises(Unsupported):
        a.feed("text")
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
def test_a_number_of_layers_that_is_none(tmp_path: Path, layers: int) -> None:
    """-1 is every layer in later releases and none in earlier ones, so it is resolved here."""
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=f"n_gpu_layers must be 0 or more, not {layers}"):
        kit.library().load_model(path, n_gpu_layers=layers)


def test_a_closed_model_is_refused(tmp_path: Path) -> None:
    """Check every use after the end."""
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
