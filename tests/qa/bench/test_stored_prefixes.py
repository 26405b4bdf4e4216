"""The benchmark of stored prefixes: its work and its verdicts; never a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import HarnessError
from qa.bench import stored_prefixes

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant


@pytest.mark.slow
@pytest.mark.native
def test_figures(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed child leaves everything that it flushed, and logits are bit-equal."""
    monkeypatch.setattr(stored_prefixes, "PREFIX", 300)
    reused, *first = stored_prefixes.figures(lambda: None, str(patched.folder), pairs=1)
    assert reused.met, reused.value
    assert reused.data["reused"] == reused.data["flushed"] > 1000
    assert len(first) == 2
    for figure in first:
        assert "bit-equal" in figure.value
        assert len(figure.data["stored"]) == len(figure.data["evaluated"]) == 1


@pytest.mark.native
def test_a_child_that_fails(patched: Variant, tiny_model: Path) -> None:
    """A child that cannot decode the chats is an error of the benchmark, not a figure."""
    with pytest.raises(HarnessError, match="out of range"):
        stored_prefixes.figures(lambda: None, str(patched.folder), 1, tiny_model)
