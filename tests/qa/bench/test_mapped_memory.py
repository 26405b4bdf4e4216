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
    """Every claim is measured; those independent of time are met."""
    monkeypatch.setattr(mapped_memory, "PROMPT", 300)
    monkeypatch.setattr(mapped_memory, "USED", 500)
    found = mapped_memory.figures(lambda: None, patched.folder, pairs=2, large=16384, shape=SMALL)
    names = [figure.name.split(",")[0] for figure in found]
    assert len(found) == 11 and len({figure.name for figure in found}) == 11, names
    by_name = {figure.name: figure for figure in found}
    assert by_name["resident after 64 tokens of 16384, flash attention"].met
    for figure in found:
        if figure.target == "bit-equal":
            assert figure.met, figure.value
        if "differ" in figure.data:
            assert figure.data["differ"] == 0
    assert any("logits bit-equal" in figure.value for figure in found)
