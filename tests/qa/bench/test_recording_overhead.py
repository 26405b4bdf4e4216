"""The benchmark of recording: its figures and its rounds; never a time."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyllamakv
from qa.bench import recording_overhead
from qa.bench.measure import Pairs


def test_a_figure_is_a_factor_with_its_bound() -> None:
    """Recorded over not recorded, of one loop on one model."""
    good = recording_overhead._figure("`step`", Path("m.gguf"), Pairs([1.02] * 30, [1.0] * 30))
    assert good.value == "1.020 [1.020, 1.020] x"
    assert good.met
    assert not recording_overhead._figure(
        "`step`", Path("m.gguf"), Pairs([1.1] * 30, [1.0] * 30)
    ).met


@pytest.mark.native
def test_every_loop_is_measured(patched, tmp_path: Path, monkeypatch) -> None:
    """Each decodes its tokens on both contexts, one of them recorded."""
    from pyllamakv.scenarios import synthetic_models

    monkeypatch.setattr(recording_overhead, "TOKENS", 16)
    ticks: list[None] = []
    with (
        pyllamakv.open(patched.folder) as lib,
        lib.load_model(synthetic_models.model("bytes")) as model,
    ):
        for sequences, size in recording_overhead.LOOPS.values():
            pairs = recording_overhead.measure(
                model, tmp_path, sequences, size, 2, lambda: ticks.append(None)
            )
            assert len(pairs.first) == len(pairs.second) == 2
            assert (tmp_path / "run.jsonl").stat().st_size > 400
    assert len(ticks) == 2 * len(recording_overhead.LOOPS)
