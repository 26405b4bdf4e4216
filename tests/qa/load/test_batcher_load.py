"""Test that the batcher gets each request at its arrival, and responses are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

import pyllamakv
from pyllamakv.server.server_lab import SLOT
from qa.load import batcher_load
from qa.load.request_schedule import LoadRequest

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = tuple(range(4, 12))


def test_requests_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context has the cells of a server; a request that no slot can hold is lost."""
    opened = kit.library()
    model = kit.write_gguf(tmp_path / "tiny.gguf")
    sizes: list[int] = []
    usual = batcher_load.SlotCache

    def slot_cache(context: pyllamakv.Context) -> Any:
        sizes.extend((context.info.n_ctx, context.info.n_seq_max))
        return usual(context)

    seconds = iter((5.0, 7.5))
    clock: list[float] = []

    def process_time() -> float:
        clock.append(next(seconds))
        return clock[-1]

    def open_library(_folder: Path) -> Any:
        # CPU time includes the start, like that of a server.
        assert clock == [5.0]
        return opened

    monkeypatch.setattr(batcher_load.time, "process_time", process_time)
    monkeypatch.setattr(pyllamakv, "open", open_library)
    monkeypatch.setattr(batcher_load, "SlotCache", slot_cache)
    ticks: list[int] = []
    requests = [
        *(LoadRequest(0.001 * n, PROMPT[: 4 + n], 3) for n in range(4)),
        LoadRequest(0.004, PROMPT * SLOT, 3),
    ]
    found = batcher_load.serve(tmp_path, model, requests, 2, 1, ticks.append)
    assert sizes == [2 * SLOT, 2]
    assert [each.tokens for each in found.timings] == [3, 3, 3, 3, 0]
    assert [bool(each.error) for each in found.timings] == [False] * 4 + [True]
    assert "refused: the prompt has 4096 tokens" in found.timings[-1].error
    assert all(each.arrived <= each.first <= each.ended for each in found.timings)
    assert ticks[-1] == 5
    assert found.cpu_seconds == 2.5


def test_closed_loop_submits_one_request_per_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one request per client is submitted at a time."""
    opened = kit.library()
    model = kit.write_gguf(tmp_path / "tiny.gguf")
    most: list[int] = []
    usual = batcher_load.Batcher.step

    def step(batcher: Any) -> Any:
        stats = batcher.stats()
        most.append(stats.waiting + stats.active)
        return usual(batcher)

    monkeypatch.setattr(pyllamakv, "open", lambda _folder: opened)
    monkeypatch.setattr(batcher_load.Batcher, "step", step)
    requests = [LoadRequest(None, PROMPT, 3)] * 5
    found = batcher_load.serve(tmp_path, model, requests, 2, 1, lambda _: None, cells=512)
    assert max(most) == 2
    assert [each.tokens for each in found.timings] == [3] * 5
    assert found.timings[2].arrived >= found.timings[0].ended
