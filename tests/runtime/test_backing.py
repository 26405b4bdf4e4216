"""What the cache is made of: choices that cannot be meant, identities, and tokens of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import runtime_kit

from pyllamakv.binding.protocol import Backing, CellsInfo, RawCells
from pyllamakv.errors import ModelError, Unsupported, UsageError
from pyllamakv.runtime import backing
from pyllamakv.runtime.ledger import Ledger


def test_builds_without_it_refuse(tmp_path: Path) -> None:
    """A library that lacks mapped memory refuses it by name, after what cannot be meant at all."""
    model = runtime_kit.model(tmp_path)
    for wanted in ("mmap", tmp_path, tmp_path / "file"):
        with pytest.raises(Unsupported, match="mmap-kv") as refused:
            model.context(kv_backing=wanted)
        assert refused.value.capability == "MAPPING"
    with pytest.raises(UsageError, match="pathlib"):
        model.context(kv_backing="file")
    with model.context() as ctx:
        assert ctx.kv.memory.kind == Backing.HEAP
        with pytest.raises(Unsupported):
            ctx.kv.flush()


def test_identity_sees_weights(tmp_path: Path) -> None:
    """Two models that differ in some weights alone are not the same."""
    first = tmp_path / "model.gguf"
    first.write_bytes(bytes(range(256)) * 8192)

    class Model:
        fingerprint = "facts"
        path = first

    before = backing.identity(cast("Any", Model))
    assert before == backing.identity(cast("Any", Model)) and before.startswith("model ")
    data = bytearray(first.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 65536] = bytes(65536)
    first.write_bytes(data)
    assert backing.identity(cast("Any", Model)) != before
    assert len(before.encode()) < 128
    first.unlink()
    with pytest.raises(ModelError, match="put it back"):
        backing.identity(cast("Any", Model))


@pytest.mark.parametrize(
    "stem",
    ["模" * 80, "\N{ROLLING ON THE FLOOR LAUGHING}" * 60, "x\udcff"],
    ids=["wide", "wider", "undecodable"],
)
def test_a_long_name_cuts_no_digest(tmp_path: Path, stem: str) -> None:
    """A file keeps 127 bytes: two models with one such name would be the same otherwise."""

    class Model:
        fingerprint = "facts"
        path = tmp_path / f"{stem}.gguf"

    Model.path.write_bytes(bytes(65536))
    one = backing.identity(cast("Any", Model))
    Model.path.write_bytes(bytes(65537))
    other = backing.identity(cast("Any", Model))
    assert one.encode()[:127] != other.encode()[:127]
    assert len(one.rpartition(" ")[2]) == 32


def test_tokens_of_cells() -> None:
    """Each cell gets the token that a ledger has at its position, shared or not."""
    ledgers = (Ledger(), Ledger())
    ledgers[0].extend([10, 11, 12], [0, 1, 5], [0, 1, 2])
    ledgers[1].extend([10, 21], [0, 1], [0, 3])
    pos = np.array([5, -1, 0, 1, 1, 7], np.int32)
    seqs = np.array([[1], [0], [3], [2], [1], [1]], np.uint64)
    raw = RawCells(cast("CellsInfo", None), pos, np.zeros(6, np.int32), seqs)
    assert backing._tokens(raw, ledgers).tolist() == [12, -1, 10, 21, 11, -1]
