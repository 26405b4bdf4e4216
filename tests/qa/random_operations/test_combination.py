"""Test random operations driven by hypothesis: a correct library passes, a fault is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit
from fakes.faulty_stages import (
    Keeping,
)
from fakes.simulated import SimulatedNative
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import pyllamakv
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import ScenarioFailed
from pyllamakv.open_variant import OpenLibrary
from pyllamakv.scenarios import synthetic_models
from qa.random_operations.operations import WEIGHTS, Operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyllamakv.building.variant import Variant
    from pyllamakv.runtime.model import Model
from qa.random_operations.combination import Combination

PLAIN = Combination()


class Machine(RuleBasedStateMachine):
    """Let hypothesis choose operations and their arguments, and minimize both.

    Long runs use a seeded generator: it needs no database, counts operations, and a schedule is a
    pure function of its seed. Hypothesis also minimizes arguments, and prefers rare values.
    """

    model: Callable[[], Model]
    options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        model = self.model()
        self.other = model.context(**self.options)
        self.work = Operations(model.context(**self.options), self.other)

    def teardown(self) -> None:
        try:
            self.work.do("verify", 0)
        finally:
            self.work.close()
            self.other.close()


def _rule(name: str) -> Any:
    def do(self: Machine, number: int) -> None:
        self.work.do(name, number)

    do.__name__ = name
    return rule(number=st.integers(0, (1 << 16) - 1))(do)


for _name in WEIGHTS:
    setattr(Machine, f"do_{_name}", _rule(_name))


@pytest.mark.slow
def test_hypothesis_finds_nothing_in_a_right_library(tmp_path: Path) -> None:
    """Cells, ledgers, bytes and logits agree after each step."""
    few = settings(max_examples=20, stateful_step_count=20)
    run_state_machine_as_test(machine(tmp_path, SimulatedNative), settings=few)


@pytest.mark.slow
def test_hypothesis_finds_a_fault(tmp_path: Path) -> None:
    """A stale cell in an emptied cache is found; minimizing it would take minutes.

    The search ends at the first example that fails: most runs need fewer than 50.
    """
    quick = settings(max_examples=1000, stateful_step_count=20, phases=(Phase.generate,))
    with pytest.raises(ScenarioFailed, match="ghost"):
        run_state_machine_as_test(machine(tmp_path, Keeping), settings=quick)


def machine(folder: Path, native: type[SimulatedNative]) -> type[Machine]:
    """Return a new machine with a simulated library."""
    runtime_kit.model(folder)

    def model() -> Model:
        library = OpenLibrary(native(heals=True), folder, None, isolated=True)
        return library.load_model(folder / "tiny.gguf")

    return on(model, n_ctx=64, n_batch=32, n_ubatch=8, n_seq_max=4)


def on(model: Callable[[], Model], **options: Any) -> type[Machine]:
    """Return the machine that plays on contexts of a model."""
    return type("Schedules", (Machine,), {"model": staticmethod(model), "options": options})


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("cache", ["flash f16", "flash q8_0", "plain q4_0/f16"])
def test_hypothesis_finds_nothing_in_llama_cpp(patched: Variant, cache: str) -> None:
    """The same machine passes on the real library."""
    few = settings(max_examples=10, stateful_step_count=25, deadline=None)
    options = {**replace(PLAIN, cache=cache).options, "defrag_policy": "on_failure"}
    with pyllamakv.open(patched.folder, isolated=True) as library:
        model = library.load_model(synthetic_models.model("grouped"))
        run_state_machine_as_test(on(lambda: model, **options), settings=few)


@pytest.mark.native
def test_hypothesis_finds_a_fault_of_llama_cpp(
    patched: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that keeps one position is found on the library as well."""
    right = Remote.seq_rm
    monkeypatch.setattr(
        Remote,
        "seq_rm",
        lambda native, context, seq, p0, p1: right(native, context, seq, max(p0, 1), p1),
    )
    quick = settings(max_examples=10, stateful_step_count=25, phases=(Phase.generate,))
    with pyllamakv.open(patched.folder, isolated=True) as library:
        model = library.load_model(synthetic_models.model("grouped"))
        with pytest.raises(ScenarioFailed, match="ghost"):
            run_state_machine_as_test(on(lambda: model, **PLAIN.options), settings=quick)
