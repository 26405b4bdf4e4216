"""Test that random schedules pass with all movers, plans and policies, and find faults."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit
from fakes.simulated import SimulatedCells, SimulatedNative
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import ScenarioFailed, Unsupported
from pyllamakv.scenarios import synthetic_models
from pyllamakv.traces import script
from qa.random_operations import operation_cases
from qa.random_operations.operation_cases import Operation
from qa.random_operations.operations import WEIGHTS, Operations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant

#: Operations of each combination, in schedules of 100 at most; more of them for a long run.
COUNT = int(os.environ.get("PYLLAMAKV_SCHEDULES") or 20)

PLANS = ("fewest", "ordered")
MOVERS = ("host", "gather", "graph", "staged")
POLICIES = ("never", "on_failure", "threshold", "always")
KINDS: dict[str, dict[str, Any]] = {
    "rows f16": {"flash_attn": True},
    "rows q8_0": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    "columns f16": {"flash_attn": False},
    "columns q8_0": {"flash_attn": False, "type_k": "q8_0"},
}
COMBINATIONS = list(itertools.product(MOVERS, PLANS, POLICIES, KINDS))
#: Quick tests have any two values together: a Latin square of movers and kinds, each with a plan.
PAIRWISE = {
    (mover, PLANS[(m // 2 + k) % 2], POLICIES[(m + k) % 4], kind)
    for m, mover in enumerate(MOVERS)
    for k, kind in enumerate(KINDS)
}


def native_opener(model: kv.Model, **options: Any) -> operation_cases.Opener:
    """Return a function that opens contexts which soon fill up with several micro-batches."""
    return lambda: model.context(n_ctx=256, n_batch=96, n_ubatch=32, n_seq_max=5, **options)


def simulated_opener(folder: Path, **options: Any) -> operation_cases.Opener:
    """Return a function that opens contexts of a simulated library that defragments."""
    model = runtime_kit.model(folder, heals=True, **options)
    return lambda: model.context(n_ctx=64, n_batch=32, n_ubatch=8, n_seq_max=4)


# Without a build...


def test_memory_without_states_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check saves states, so a memory without them is refused before the first step."""

    def refuse(*_: object) -> bytes:
        raise Unsupported("this release cannot save a sequence of a hybrid model", "STATES")

    opener = simulated_opener(tmp_path)
    monkeypatch.setattr(SimulatedNative, "state_save", refuse)
    begun: list[Operations] = []
    with pytest.raises(Unsupported, match="hybrid"):
        operation_cases.CaseRunner(opener).play(
            operation_cases.generate_operations(1, 5), begun.append
        )
    assert not begun


def test_seed_determines_the_schedule() -> None:
    """Its start is the schedule of the same seed with fewer steps."""
    assert operation_cases.generate_operations(7, 50) == operation_cases.generate_operations(7, 50)
    assert operation_cases.generate_operations(7, 50) != operation_cases.generate_operations(8, 50)
    assert {each.name for each in operation_cases.generate_operations(1, 2000)} == set(WEIGHTS)


def test_every_name_is_an_operation() -> None:
    """Every name of a schedule can be run."""
    assert all(callable(getattr(Operations, f"_{name}")) for name in WEIGHTS)


def test_operations_without_effect_are_not_counted(tmp_path: Path) -> None:
    """An operation without anything to do was not tested."""
    works: list[Operations] = []
    idle = [Operation(name, 1) for name in ("restore", "save", "thin")]
    acts = [Operation("decode", 1), Operation("save", 1)]
    ground = operation_cases.CaseRunner(simulated_opener(tmp_path))
    assert ground.play([*idle, *acts], works.append) is None
    assert works[0].done == {"decode": 1, "save": 1, "verify": 1}


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(
        st.builds(Operation, st.sampled_from(sorted(WEIGHTS)), st.integers(0, 1 << 16)),
        min_size=10,
        max_size=40,
    )
)
def test_any_schedule_passes(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Operation]
) -> None:
    """A correct library agrees with the ledger for any operations in any order."""
    failed = operation_cases.CaseRunner(simulated_opener(tmp_path_factory.mktemp("model"))).play(
        operations
    )
    assert failed is None, failed


def vanish(cache: SimulatedCells) -> None:
    """Forget the last used cell."""
    cache.discard(cache.of(-1)[-1:])


def stay(cache: SimulatedCells) -> None:
    """Leave the last used cell behind, at the end of the cache."""
    last = cache.used[-1]
    for array in (cache.slots, cache.shift):
        array[-1], array[last] = array[last], array[-1]
    cache.rows[:, -1] = cache.rows[:, last]


def disown(cache: SimulatedCells) -> None:
    """Keep the first sequence of each cell."""
    for cell in cache.of(-1):
        cell.seqs = {min(cell.seqs)}


def swap(cache: SimulatedCells) -> None:
    """Exchange the values of the first two cells in the last layer."""
    cache.rows[-1, [0, 1]] = cache.rows[-1, [1, 0]]


@pytest.mark.parametrize(
    ("fault", "kind"), [(vanish, "lost"), (stay, "claim"), (disown, "lost"), (swap, "data")]
)
def test_planted_fault_fails_within_a_few_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, kind: str
) -> None:
    """A library with one kind of wrong moves fails within a few cases, with the reason."""
    right = SimulatedCells.compact

    def wrong(cache: SimulatedCells) -> tuple[int, int]:
        done = right(cache)
        if done[0]:
            fault(cache)
        return done

    monkeypatch.setattr(SimulatedCells, "compact", wrong)
    opener = simulated_opener(tmp_path)
    found = (
        operation_cases.CaseRunner(opener).play(operation_cases.generate_operations(seed, 30))
        for seed in range(20)
    )
    first = next((each for each in found if each is not None), None)
    assert first is not None
    assert first.failure == kind, first


def test_a_failure_has_its_seed_and_the_shortest_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minimized case is a script that still fails, and each of its operations is needed."""
    right = SimulatedCells.compact
    monkeypatch.setattr(SimulatedCells, "compact", lambda cache: (right(cache), vanish(cache))[0])
    opener = simulated_opener(tmp_path)
    seed = next(
        s
        for s in range(20)
        if operation_cases.CaseRunner(opener).play(operation_cases.generate_operations(s, 30))
    )
    with pytest.raises(ScenarioFailed, match=f"^seed {seed}: ") as caught:
        operation_cases.run_seed(opener, seed, 30)
    recorded = caught.value.evidence["script"]
    lines = list(script.parse(recorded))
    assert lines[-1].op in ("defrag", "decode", "verify")
    assert str(caught.value).endswith("\n".join(recorded))
    short = caught.value.evidence["operations"]
    assert set(short) <= set(operation_cases.generate_operations(seed, 30))
    for number in range(len(short)):
        less = short[:number] + short[number + 1 :]
        assert operation_cases.CaseRunner(opener).play(less) is None


@pytest.mark.slow
def test_a_library_without_defragmentation_may_find_no_slot(tmp_path: Path) -> None:
    """Without that promise, a decode may fail for fragmentation; all other checks apply."""
    model = runtime_kit.model(tmp_path)
    opener: operation_cases.Opener = lambda: model.context(64, 32, 8, 4)  # noqa: E731
    drawn = [operation_cases.generate_operations(seed, 30) for seed in range(10)]
    held = [operation_cases.CaseRunner(opener).play(each) for each in drawn]
    assert {each.failure for each in held if each is not None} == {"claim"}
    assert all(
        operation_cases.CaseRunner(opener, defrags_on_failure=False).play(each) is None
        for each in drawn
    )


# On real builds...


@pytest.fixture(scope="module")
def opened(patched: Variant) -> Iterator[kv.Model]:
    """Load a model of two layers into the patched library."""
    with kv.open(patched.folder) as library:
        yield library.load_model(synthetic_models.model("grouped"))


@pytest.fixture(scope="module")
def unguarded(patched: Variant) -> Iterator[kv.Model]:
    """Load it without the guard and the checks of this package."""
    with kv.open(patched.folder, isolated=True) as library:
        yield library.load_model(synthetic_models.model("grouped"))


@pytest.mark.native
@pytest.mark.parametrize(
    ("mover", "plan", "policy", "kind"),
    [
        pytest.param(*each, id=" ".join(each), marks=() if each in PAIRWISE else pytest.mark.slow)
        for each in COMBINATIONS
    ],
)
def test_every_combination_passes(
    opened: kv.Model, mover: Any, plan: Any, policy: Any, kind: str
) -> None:
    """Cells, K and V, and logits are right after every operation, with all movers and policies."""
    opener = native_opener(
        opened, defrag_mover=mover, defrag_plan=plan, defrag_policy=policy, **KINDS[kind]
    )
    first = COMBINATIONS.index((mover, plan, policy, kind))
    prove_many(opener, first)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mover", MOVERS)
def test_the_library_alone_passes(unguarded: kv.Model, mover: Any, plan: Any, kind: str) -> None:
    """They are if only the patch rolls back a failed decode."""
    opener = native_opener(
        unguarded, guard="off", defrag_mover=mover, defrag_plan=plan, **KINDS[kind]
    )
    prove_many(opener, 1000 + COMBINATIONS.index((mover, plan, "never", kind)))


@pytest.mark.native
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_later_release_passes(plan: Any, policy: Any) -> None:
    """It does if slots are scattered and `compaction` moves cells, if that is built here."""
    found = built("0.3.36+patched")
    options = {"defrag_plan": plan, "defrag_policy": policy}
    with kv.open(found.folder) as library:
        model = library.load_model(synthetic_models.model("grouped"))
        for number, (mover, kind) in enumerate(itertools.product(MOVERS, KINDS.values())):
            prove_many(native_opener(model, defrag_mover=mover, **options, **kind), 2000 + number)


@pytest.mark.native
@pytest.mark.parametrize("release", ["0.3.16", "0.3.36"])
@pytest.mark.parametrize("name", ["grouped", "hybrid"])
def test_random_operations_pass_with_streams(release: str, name: str) -> None:
    """Cells, K and V, and logits are right in caches with a stream per sequence."""
    found = built(f"{release}+patched")
    with kv.open(found.folder, isolated=True, env={"LLAMA_SET_ROWS": "1"}) as library:
        model = library.load_model(synthetic_models.model(name))
        opener = native_opener(model, kv_unified=False)
        with opener() as context:
            assert context.info.n_streams == context.info.n_seq_max
        prove_many(opener, 3000)


@pytest.mark.slow
@pytest.mark.native
def test_stock_breaks_the_promise(stock: Variant) -> None:
    """Stock finds no slot although enough cells are free; with a policy it does."""
    drawn = [operation_cases.generate_operations(seed, 40) for seed in range(12)]
    with kv.open(stock.folder, isolated=True) as library:
        model = library.load_model(synthetic_models.model("grouped"))
        found = [operation_cases.CaseRunner(native_opener(model)).play(each) for each in drawn]
        assert {each.failure for each in found if each is not None} == {"claim"}
        assert any("free cells ended with no-slot" in str(each) for each in found)
        for each in drawn:
            assert (
                operation_cases.CaseRunner(native_opener(model), defrags_on_failure=False).play(
                    each
                )
                is None
            )
            healed = operation_cases.CaseRunner(
                native_opener(model, defrag_policy="on_failure")
            ).play(each)
            assert healed is None, healed


def prove_many(opener: operation_cases.Opener, first: int) -> None:
    """Play `COUNT` operations in schedules of 100; seeds differ between tests."""
    for number, start in enumerate(range(0, COUNT, 100)):
        operation_cases.run_seed(opener, first + 10_000 * number, min(100, COUNT - start))
