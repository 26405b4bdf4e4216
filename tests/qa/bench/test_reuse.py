"""Test that reuse below the target, longer waits and endless tries are missed targets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models
from qa.bench import reuse


@dataclass
class User:
    """A generation, as far as figures need it."""

    cached: int
    deferred: int


@pytest.mark.parametrize(("cached", "deferred"), [(400, 7), (0, 7), (400, 65)])
def test_a_burst_is_compared_with_both_targets(cached: int, deferred: int) -> None:
    """The first user cannot reuse anything."""
    users = [User(0, 0), *[User(cached, deferred)] * (reuse.USERS - 1)]
    share, wait = reuse.burst_figures("attention", users)  # type: ignore[arg-type]
    assert (share.met, wait.met) == (cached == 400, deferred == 7)
    assert share.value == f"{cached / 4:.1f}% of the possible reuse"


@pytest.mark.native
@pytest.mark.slow
def test_a_prompt_that_keeps_nothing_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context is needed whose micro-batches are complete before the cancel."""
    with (
        kv.open(built("b11549+patched").folder) as library,
        library.load_model(synthetic_models.model("hybrid")) as model,
    ):
        cancels = reuse.CancelledPrompts(model.native)
        assert reuse.cancelled_figure(model, cancels, kv.SlotCache, batched=True).met
        monkeypatch.setattr(reuse, "CANCEL", 50)
        assert not reuse.cancelled_figure(model, cancels, kv.SlotCache, batched=True).met
