"""Test that a real instruct model generates the same text on stock and patched builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import pyllamakv as kv

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.real_model
def test_stock_and_patched_generate_the_same_text(
    stock: Variant, patched: Variant, real_model: Path
) -> None:
    """16 greedily chosen tokens are readable text and equal on both builds."""
    texts = []
    for variant in (stock, patched):
        with (
            kv.open(variant.folder) as library,
            library.load_model(real_model) as model,
            model.context(n_ctx=256, n_threads=1) as context,
        ):
            sequence = context.sequence()
            sequence.prefill(model.tokenize("The capital of France is"))
            texts.append("".join(sequence.generate(max_tokens=16)))
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]
