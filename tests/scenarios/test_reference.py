"""Test that the reference repeats all operations, with windows and shared tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import ScenarioFailed, UsageError
from pyllamakv.runtime.batch import Batch
from pyllamakv.scenarios import kv_rows, synthetic_models
from pyllamakv.scenarios.player import Player
from pyllamakv.scenarios.reference import Reference
from qa.random_operations.context_player import ContextPlayer
from qa.random_operations.operation_base import OperationBase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS = {"n_ctx": 256, "n_batch": 96, "n_ubatch": 32, "n_seq_max": 5}


def behind(reference: Reference) -> Player:
    """Return a player of the context that a reference uses."""
    player = reference.player
    return Player(player.native, player.model, player.params, reference._context)


# Without a build...


def test_reference_detects_different_logits(tmp_path: Path) -> None:
    """The logits of a player are compared with those of the reference."""
    player = ContextPlayer(runtime_kit.context(tmp_path))
    reference = Reference(player)
    player.decode({0: 6})
    reference.catch_up()
    player.decode({0: 1})
    player.steps[-1].logits[0] = player.steps[-1].logits[0] + 1
    with pytest.raises(ScenarioFailed, match="position 6 of sequence 0"):
        reference.catch_up()


@pytest.mark.parametrize("n_caches", [1, 2])
def test_window_cells_are_shared_only_with_a_second_cache(tmp_path: Path, n_caches: int) -> None:
    """Only a second cache frees cells of a window; removed cells are not shared."""
    player = ContextPlayer(runtime_kit.context(tmp_path))
    player.info = replace(player.info, n_swa=8, n_caches=n_caches)
    reference = Reference(player)
    player.decode({0: 12, 1: 9})
    player.remove(1, 4)
    player.decode({2: 3})
    reference.catch_up()
    snapshot = behind(reference).snapshot()
    assert snapshot is not None
    (cells,) = snapshot.streams
    assert sorted(cells.sharers[cells.used].tolist()) == [1] * 3 + [n_caches] * 16
    # Nor has a batch a second part that could use cells of its first one.
    whole = behind(reference).info.n_ubatch == player.params.n_batch
    assert whole == (n_caches == 2)


def test_a_sequence_with_a_partial_window_shares_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other sequences share tokens if their windows start and end equally."""
    actor = OperationBase(*(runtime_kit.context(tmp_path) for _ in range(2)))
    subject = actor.subject
    subject.decode({0: 10, 1: 10, 2: 10})
    assert actor._ends() == [(0, 9), (0, 9), (0, 9), ()]
    subject.info = replace(subject.info, n_swa=8)
    left = {0: list(range(10)), 1: list(range(4, 10)), 2: list(range(10))}
    monkeypatch.setattr(kv_rows, "sliding", lambda _: left)
    assert actor._ends() == [(0, 9), (1,), (0, 9), ()]
    actor.close()


# On real builds...


@pytest.fixture(scope="module")
def sliding() -> Iterator[kv.Model]:
    """Load a model with a sliding window into a release that has a separate cache for it."""
    with kv.open(built("0.3.36+patched").folder) as library:
        yield library.load_model(synthetic_models.model("sliding"))


@pytest.mark.native
def test_the_reference_keeps_what_a_window_has_passed(sliding: kv.Model) -> None:
    """The reference keeps all positions, although llama.cpp may reuse expired cells."""
    with sliding.context(**OPTIONS) as context:
        subject = ContextPlayer(context)
        reference = Reference(subject)
        subject.decode({1: 8})
        subject.decode({0: 60})
        subject.remove(1)
        subject.decode({2: 40})
        reference.catch_up()
        snapshot = behind(reference).snapshot()
        assert snapshot is not None
        assert sorted((kv_rows.sliding(snapshot) or {})[0]) == list(range(60))
        assert reference.worst < reference.bound
        reference.close()


@pytest.mark.native
def test_window_missing_in_the_reference_is_not_compared(sliding: kv.Model) -> None:
    """A compacted subject keeps the window before a removal, which the reference lost.

    A later decode of the reference continues behind the holes, among cells outside of the window.
    """
    with sliding.context(**OPTIONS, kv_unified=False) as context:
        subject = ContextPlayer(context)
        reference = Reference(subject)
        subject.decode({0: 52})
        for pos in range(1, 51, 2):
            subject.remove(0, pos, pos + 1)
        subject.defrag()
        subject.decode({0: 32})
        subject.decode({0: 64})
        subject.remove(0, 54)
        subject.decode({0: 1})
        reference.catch_up()
        assert reference._lost == {0}
        assert reference.worst < reference.bound
        subject.remove(0)
        subject.decode({0: 40})
        reference.catch_up()
        assert not reference._lost
        reference.close()


@pytest.mark.native
def test_a_token_for_other_windows_is_refused(sliding: kv.Model) -> None:
    """A restored sequence has only its window; the saved one has all its tokens."""
    with sliding.context(**OPTIONS) as context:
        one, other = context.sequence(), context.sequence()
        context.decode(one.feed(list(range(3, 63))))
        other.restore(one.save())
        batch: Any = Batch.of([5], [60], [0, 1], counts=[2])
        with pytest.raises(UsageError, match="sliding-window cache"):
            context.decode(batch)
        assert (len(one), len(other)) == (60, 60)
        other.close()
        other = one.fork()
        context.decode(batch)
        assert (len(one), len(other)) == (61, 61)
