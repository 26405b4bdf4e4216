"""Models are told apart by little of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.errors import UsageError
from pyllamakv.scenarios import synthetic
from pyllamakv.traces import identity


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.delenv(synthetic.VARIABLE, raising=False)


def test_generated_models_have_names_and_digests_of_their_own() -> None:
    """The name stands for the file wherever the home is."""
    tiny, grouped = synthetic.model("tiny"), synthetic.model("grouped")
    assert (identity.name(tiny), identity.name(grouped)) == ("tiny", "grouped")
    assert identity.identity(tiny) == identity.identity(synthetic.model("tiny"))
    assert identity.identity(tiny) != identity.identity(grouped)


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    """The same header with other tensors is told apart, though not every byte is read."""
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    data = bytearray(4 << 20)
    one.write_bytes(data)
    data[identity.HEADER + 10 :] = b"x" * (len(data) - identity.HEADER - 10)
    other.write_bytes(data)
    assert identity.identity(one) != identity.identity(other)
    assert identity.name(one) == str(one)
    # A file that is replaced is looked at again.
    before = identity.identity(one)
    one.write_bytes(b"GGUF")
    assert identity.identity(one) != before


def test_a_model_is_found_where_the_variable_says(tmp_path: Path, monkeypatch) -> None:
    """The recorded path comes first, then the user's model if it is that one; else a cure."""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF and more")
    digest = identity.identity(mine)
    assert identity.find(str(mine), digest) == mine
    with pytest.raises(UsageError, match="--model"):
        identity.find("/no/such/model.gguf", digest)
    monkeypatch.setenv(synthetic.VARIABLE, str(mine))
    assert identity.find("/no/such/model.gguf", digest) == mine
    with pytest.raises(UsageError, match="is not here"):
        identity.find("/no/such/model.gguf", "another")
    with pytest.raises(UsageError, match="cannot be read"):
        identity.identity(tmp_path / "missing.gguf")
