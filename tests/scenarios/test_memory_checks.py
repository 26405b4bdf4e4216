"""Test that the checks of a memory detect each wrong result of a library."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.binding.protocol import Capability, Counters, ModelParams
from pyllamakv.errors import NativeError, ScenarioFailed, Unsupported, WorkerDied
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.cell_ledger import CellLedger, window_errors
from pyllamakv.scenarios.lab import Lab
from pyllamakv.scenarios.memory_checks import check_searches, exercise_memory
from pyllamakv.scenarios.scenario import Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.scenarios.player import Player


class Liar:
    """Forward all calls to a library, except one call for the first context."""

    def __init__(self, native: Any, name: str, answer: Callable[..., Any]) -> None:
        self._native, self._name, self._answer = native, name, answer
        self._first: Any = None

    def context_new(self, *arguments: Any) -> Any:
        """Create a context, and store the first one."""
        made = self._native.context_new(*arguments)
        self._first = made if self._first is None else self._first
        return made

    def __getattr__(self, name: str) -> Any:
        true = getattr(self._native, name)
        if name != self._name:
            return true

        def lie(context: Any, *arguments: Any) -> Any:
            if context != self._first:
                return true(context, *arguments)
            return self._answer(true, context, *arguments)

        return lie


class Everywhere(Liar):
    """Change a call for every context, including the reference."""

    def __getattr__(self, name: str) -> Any:
        true = getattr(self._native, name)
        return true if name != self._name else partial(self._answer, true)


def run(native: Any, check: Callable[[Lab, Player], None] = exercise_memory) -> None:
    """Run a check on a tiny model in this process."""
    model = native.model_load(str(synthetic_models.tiny()), ModelParams())
    lab = Lab(native, model, Setting())
    try:
        check(lab, lab.player(256, n_seq_max=4))
    finally:
        lab.close()
        native.model_free(model)


@pytest.mark.native
def test_memory_checks_pass_on_a_correct_library(library: Any) -> None:
    """Without a fault nothing is found."""
    run(library.native)


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("seq_rm", lambda true, *a: True),
        ("seq_cp", lambda true, *a: None),
        ("seq_add", lambda true, *a: None),
        ("seq_keep", lambda true, *a: None),
        ("state_load", lambda true, context, seq, data: len(data)),
        ("state_save", lambda true, context, seq: true(context, (seq + 1) % 2)),
        ("seq_rm", lambda true, context, seq, p0, p1: true(context, seq, p0, -1)),
    ],
    ids=["removes-not", "copies-not", "shifts-not", "keeps-all", "loads-not", "other-rows", "more"],
)
def test_memory_checks_fail_on_damaged_memory(
    library: Any, name: str, answer: Callable[..., Any]
) -> None:
    """Cells, rows or logits show the damage."""
    with pytest.raises((ScenarioFailed, NativeError)):
        run(Liar(library.native, name, answer))


@pytest.mark.native
def test_memory_checks_compare_restored_rows(library: Any) -> None:
    """Restored rows are compared with the saved ones, not only with a reference's logits."""

    def restore(true: Any, context: Any, seq: int, data: bytes) -> int:
        rows = data[:-64] + bytes(64) if len(data) > 256 else data
        return int(true(context, seq, rows))

    with pytest.raises(ScenarioFailed, match="the restore changed"):
        run(Everywhere(library.native, "state_load", restore))


@pytest.mark.native
def test_memory_checks_require_one_slot_search_per_token(library: Any) -> None:
    """A token needs one slot search; other counts, and no counts, fail the claim."""
    if not library.native.about.capabilities & Capability.COUNTERS:
        pytest.skip("without counters there is nothing to check")
    run(library.native, check_searches)

    def counted_twice(true: Any, context: Any) -> Counters:
        found: Counters = true(context)
        return replace(found, slot_searches=2 * found.slot_searches)

    def refuse(*_: Any) -> Counters:
        raise Unsupported("none", capability="counters")

    with pytest.raises(ScenarioFailed, match="expected 1 slot searches, counted"):
        run(Liar(library.native, "counters", counted_twice), check_searches)
    with pytest.raises(ScenarioFailed, match="none for this memory"):
        run(Liar(library.native, "counters", refuse), check_searches)


@pytest.mark.native
def test_worker_death_is_no_refusal_of_damaged_input(library: Any) -> None:
    """The end of a worker is reported as such, not as a refusal of the next input."""

    def dies(*_: Any) -> Any:
        raise WorkerDied("ended by SIGABRT", signal=6)

    with pytest.raises(WorkerDied):
        run(Liar(library.native, "state_load", dies))


def test_window_requires_the_last_positions_without_gaps() -> None:
    """The last positions are required, older ones optional; gaps and duplicates are faults."""
    ledger = CellLedger()
    ledger.add(range(20), range(20), [(0,)] * 20)
    assert window_errors(ledger, {0: list(range(13, 20))}, 8) == ""
    assert window_errors(ledger, {0: list(range(20))}, 8) == ""
    assert "lost" in window_errors(ledger, {0: list(range(14, 20))}, 8)
    assert "lost" in window_errors(ledger, {0: [5, *range(13, 20)]}, 8)
    assert "ghost" in window_errors(ledger, {0: list(range(13, 21))}, 8)
    assert "ghost" in window_errors(ledger, {0: [13, *range(13, 20)]}, 8)
    assert "ghost" in window_errors(ledger, {0: list(range(13, 20)), 1: [0]}, 8)
    assert "lost" in window_errors(ledger, {}, 8)


def test_copies_between_streams_have_cells_of_their_own() -> None:
    """If a sequence has its own stream, a copy replaces its content and shares nothing."""
    ledger = CellLedger(streams=True)
    ledger.add([1, 2, 3], [0, 1, 2], [(0,)] * 3)
    ledger.add([9], [0], [(1,)])
    ledger.copy(0, 1)
    assert ledger.used == 6
    assert ledger.of(1) == ledger.of(0)
    ledger.remove(0)
    assert ledger.of(1) == [(0, 1), (1, 2), (2, 3)]
