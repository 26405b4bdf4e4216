"""A library that computes nothing: `PrefixCache` runs on it as on llama.cpp, at any size.

Its contexts have attention memory, more cells than needed, and a sequence for every branch. The
only limit is the budget of the cache. A cell has one byte, so that a budget is a number of cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pyllamakv.binding.protocol import (
    Capability,
    CellsInfo,
    ContextInfo,
    ContextParams,
    LibraryInfo,
    MemoryType,
    ModelInfo,
    RawCells,
)
from pyllamakv.errors import Unsupported
from pyllamakv.open_variant import OpenLibrary
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

_WIDTH: Final = 32


class CountingLibrary:
    """Implement the part of `Native` that a prefix cache without paging needs."""

    def __init__(self, n_vocab: int) -> None:
        self.about = LibraryInfo(1, "counting", Capability.CELLS)
        self.environment: dict[str, str] = {}
        self._vocabulary = n_vocab
        self._params = ContextParams()
        self._decoded = False

    def close(self) -> None:
        """Close nothing."""

    def model_load(self, path: str, params: object) -> int:
        """Return the only model."""
        return 1

    def model_free(self, model: int) -> None:
        """Free nothing."""

    def model_info(self, model: int) -> ModelInfo:
        """Return a small model."""
        return ModelInfo(
            n_vocab=self._vocabulary, n_ctx_train=1 << 20, n_embd=_WIDTH, n_layer=1, n_head=1,
            n_head_kv=1, n_embd_k_gqa=_WIDTH, n_embd_v_gqa=_WIDTH, has_vocab=False, token_bos=-1,
            token_eos=-1, token_eot=-1, token_nl=-1, add_bos=False, is_recurrent=False,
            n_params=1, n_bytes=0,
        )  # fmt: skip

    def model_meta(self, model: int, key: str) -> str | None:
        """Return nothing: no metadata matters."""
        return None

    def context_new(self, model: int, params: ContextParams) -> int:
        """Return the only context."""
        self._params = params
        return 1

    def context_free(self, context: int) -> None:
        """Free nothing."""

    def context_info(self, context: int) -> ContextInfo:
        """Describe attention memory whose slots may be scattered."""
        params = self._params
        return ContextInfo(
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, MemoryType.ATTENTION,
            n_caches=1, can_shift=True, can_remove_partly=True, contiguous_slots=False,
            defrag=False, flash_attn=True, v_transposed=False, n_streams=1,
        )  # fmt: skip

    def threads(self, context: int, n_threads: int, n_threads_batch: int) -> None:
        """Change nothing: nothing is computed."""

    def cells(self, context: int, cache: int) -> RawCells:
        """Return the empty cache. Raises Unsupported after a decode: nothing is recorded."""
        if self._decoded:
            msg = "the counting library records no cells"
            raise Unsupported(msg, "CELLS")
        n = self._params.n_ctx
        info = CellsInfo(0, False, n, 0, 0, False, 1, 1, 1, False, 1, n, 0)
        free, none = np.full(n, -1, np.int32), np.zeros(n, np.int32)
        return RawCells(info, free, none, np.zeros((n, 1), np.uint64))

    def decode(self, context: int, *batch: Any) -> int:
        """Succeed."""
        self._decoded = True
        return 0

    def seq_rm(self, context: int, seq: int, p0: int, p1: int) -> bool:
        """Succeed."""
        return True

    def seq_cp(self, context: int, src: int, dst: int, p0: int, p1: int) -> None:
        """Copy nothing."""


@contextmanager
def counting_context(cells: int, sequences: int, n_vocab: int) -> Iterator[Context]:
    """Open a context that computes nothing."""
    native: Any = CountingLibrary(n_vocab)
    options: dict[str, Any] = {
        "n_ctx": cells,
        "n_batch": 4096,
        "n_ubatch": 4096,
        "n_seq_max": sequences,
    }
    with (
        OpenLibrary(native, Path("counting"), None) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(**options, kv_unified=True) as context,
    ):
        yield context
