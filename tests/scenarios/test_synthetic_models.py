"""Test that generated models depend only on their shape."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from model_kit import CONTENT, NAME, pin, write_wheel

from pyllamakv.errors import NotFetched, Untestable, UsageError
from pyllamakv.runtime import ggml_types as types
from pyllamakv.scenarios import synthetic_models


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def test_the_same_shape_gives_the_same_bytes(tmp_path) -> None:
    """A file contains no time, path or machine."""
    for shape in synthetic_models.SHAPES.values():
        synthetic_models.write(shape, tmp_path / "one.gguf")
        synthetic_models.write(shape, tmp_path / "other.gguf")
        assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_a_model_is_written_once() -> None:
    """The second call returns the file of the first, and no partial file remains."""
    path = synthetic_models.tiny()
    stamp = path.stat().st_mtime_ns
    assert synthetic_models.tiny() == path
    assert path.stat().st_mtime_ns == stamp
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size < 60_000


def test_failed_write_leaves_no_partial_file(monkeypatch, tmp_path) -> None:
    """A failed write removes its partial file."""
    monkeypatch.setattr(
        synthetic_models, "write", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        synthetic_models.tiny()
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("name", list(synthetic_models.SHAPES))
def test_rows_fit_quantized_blocks(name: str) -> None:
    """K and V rows, and those of every head, are multiples of 32."""
    shape = synthetic_models.SHAPES[name]
    head = shape.head or shape.n_embd // shape.n_head
    assert head % 32 == 0
    assert head * shape.n_head_kv % 32 == 0


def test_capped_scores_get_the_heads_that_cuda_supports() -> None:
    """CUDA's flash attention has no kernel for smaller heads of gemma2."""
    assert synthetic_models.SHAPES["sliding-wide"].architecture == "gemma2"
    assert synthetic_models.SHAPES["sliding-wide"].head == 128
    assert synthetic_models.SHAPES["tiny-wide"].head == 64


@pytest.mark.parametrize("name", ["tiny-wide", "grouped-wide", "sliding-wide"])
def test_wide_rows_begin_where_devices_align_buffers(name: str) -> None:
    """Rows of K and V have 256 values, and quantized ones are a multiple of 16 bytes."""
    reader = gguf.GGUFReader(synthetic_models.model(name))
    ends = ("attn_k.weight", "attn_v.weight")
    widths = {int(each.shape[1]) for each in reader.tensors if each.name.endswith(ends)}
    assert widths == {256}
    for kind in ("q8_0", "q4_0"):
        assert types.number_type(kind).row_bytes(256) % 16 == 0


def test_model_metadata_and_tensors_match_the_shape() -> None:
    """The metadata and tensors are those of the shape."""
    shape = synthetic_models.SHAPES["grouped"]
    reader = gguf.GGUFReader(synthetic_models.model("grouped"))
    assert reader.fields["llama.block_count"].contents() == shape.n_layer
    assert reader.fields["llama.attention.head_count_kv"].contents() == shape.n_head_kv
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert "blk.1.ffn_down.weight" in tensors
    assert np.isfinite(tensors["output.weight"].data).all()


def test_metadata_of_models_define_each_kind_of_memory() -> None:
    """Windows, states and latent attention are those of the metadata."""
    fields = gguf.GGUFReader(synthetic_models.model("sliding")).fields
    assert fields["gemma2.attention.sliding_window"].contents() == 32
    # With any other number of layers, older releases abort.
    assert fields["gemma2.block_count"].contents() in (26, 42, 46)
    fields = gguf.GGUFReader(synthetic_models.model("hybrid")).fields
    assert fields["jamba.attention.head_count_kv"].contents() == [0, 1, 0, 1]
    tensors = {each.name for each in gguf.GGUFReader(synthetic_models.model("recurrent")).tensors}
    assert "blk.1.ssm_a" in tensors
    tensors = {each.name for each in gguf.GGUFReader(synthetic_models.model("latent")).tensors}
    assert {"blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"} <= tensors


def test_the_byte_vocabulary_has_every_byte() -> None:
    """Any text can be tokenized."""
    reader = gguf.GGUFReader(synthetic_models.model("bytes"))
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(words)
    assert len(words) == len(set(words)) == synthetic_models.SHAPES["bytes"].n_vocab


@pytest.mark.regression(
    "names in a script with a lone surrogate, or too long for a file, raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_model_names_other_than_shapes_are_paths_or_refused(tmp_path, monkeypatch) -> None:
    """A path is unchanged, `test` is the user's model, others are refused with the choices."""
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    assert synthetic_models.model(str(file)) == file
    monkeypatch.setenv("PYLLAMAKV_TEST_MODEL", str(file))
    assert synthetic_models.model("test") == file
    assert synthetic_models.identity("test") != synthetic_models.identity("tiny")
    monkeypatch.delenv("PYLLAMAKV_TEST_MODEL")
    with pytest.raises(Untestable, match="PYLLAMAKV_TEST_MODEL"):
        synthetic_models.model("test")
    assert synthetic_models.identity("test") == ""
    for name in ("giant", "a" * 5000, "a\0b", "\ud800"):
        with pytest.raises(UsageError, match="tiny"):
            synthetic_models.model(name)


def test_fetched_model_is_found_by_name(tmp_path, monkeypatch) -> None:
    """The model is found by name; without its file, the error has the command."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    pinned = pin(tmp_path, monkeypatch, write_wheel(tmp_path, {}))
    with pytest.raises(NotFetched, match=f"pyllamakv model get {NAME}"):
        synthetic_models.model(NAME)
    assert synthetic_models.identity(NAME) == pinned.sha256
    pinned.path.parent.mkdir()
    pinned.path.write_bytes(CONTENT)
    assert synthetic_models.model(NAME) == pinned.path
    with pytest.raises(UsageError, match=NAME):
        synthetic_models.model("giant")
