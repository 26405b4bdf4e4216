"""Test functions that the binding does not use, in C++ programs that link a built library."""

from __future__ import annotations

from pathlib import Path

import pytest
from linked_program_kit import run_inside

from pyllamakv.scenarios import synthetic_models


@pytest.mark.native
def test_compaction_keeps_cells_referenced_by_index(tmp_path: Path) -> None:
    """Check shared cells, mirrors that differ, and a compaction before a batch."""
    models = [str(synthetic_models.model(name)) for name in ("tiny", "indexed")]
    run_inside("0.3.36+patched", "refusals", tmp_path, *models)


@pytest.mark.native
def test_whole_context_state_is_restored(tmp_path: Path) -> None:
    """Check llama_state_set_data with the patch scattered-restore."""
    run_inside("b6845+patched", "whole_state", tmp_path, str(synthetic_models.model("tiny")))
