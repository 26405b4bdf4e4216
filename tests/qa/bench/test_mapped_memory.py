"""Test the benchmark of mapped memory and the heap, with a small model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.scenarios import architectures
from qa.bench import mapped_memory

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

SMALL = architectures.Shape("small-wide", n_layer=2, n_embd=64, n_head=2, n_head_kv=2, n_vocab=64)


@pytest.mark.slow
@pytest.mark.native
def test_mapped_memory_figures_cover_every_claim(
    patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every claim is measured; the kept file has the same logits."""
    monkeypatch.setattr(mapped_memory, "PROMPT", 300)
    monkeypatch.setattr(mapped_memory, "USED", 500)
    found = mapped_memory.figures(lambda: None, patched.folder, pairs=2, shape=SMALL)
    assert [figure.name.split(",")[0] for figure in found] == [
        *["decoding after 500 tokens"] * 3,
        "the next token after a prompt of 300: from a kept file over evaluating again",
    ]
    assert "logits bit-equal" in found[-1].value
