"""Test the options of the cache's memory, and the tokens of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import runtime_kit

from pyllamakv.binding.protocol import Backing, CellsInfo, RawCells
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime import backing
from pyllamakv.runtime.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path


def test_build_without_mapped_memory_refuses_it(tmp_path: Path) -> None:
    """Invalid options are refused first, then a missing capability by its name."""
    model = runtime_kit.model(tmp_path)
    for wanted in ("mmap", tmp_path, tmp_path / "file"):
        with pytest.raises(Unsupported, match="mmap-kv") as refused:
            model.context(kv_backing=wanted)
        assert refused.value.capability == "MAPPING"
    with pytest.raises(UsageError, match="pathlib"):
        model.context(kv_backing="file")
    with pytest.raises(UsageError, match=r"kv_backing must be 'heap', 'mmap' or a pathlib\.Path"):
        model.context(kv_backing=cast("str", None))
    with model.context() as ctx:
        assert ctx.kv.memory.kind == Backing.HEAP
        with pytest.raises(Unsupported):
            ctx.kv.flush()


def test_cell_tokens_are_those_of_the_ledgers() -> None:
    """Each cell has the token that a ledger has at its position, shared or not."""
    ledgers = (Ledger(), Ledger())
    ledgers[0].extend([10, 11, 12], [0, 1, 5], [0, 1, 2])
    ledgers[1].extend([10, 21], [0, 1], [0, 3])
    pos = np.array([5, -1, 0, 1, 1, 7], np.int32)
    seqs = np.array([[1], [0], [3], [2], [1], [1]], np.uint64)
    raw = RawCells(cast("CellsInfo", None), pos, np.zeros(6, np.int32), seqs)
    assert backing._tokens(raw, ledgers).tolist() == [12, -1, 10, 21, 11, -1]
