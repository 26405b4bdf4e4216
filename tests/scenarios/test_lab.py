"""Test that the lab finds each class of defect, and that a crash ends only its own run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

from pyllamakv.binding.protocol import Capability, ModelParams
from pyllamakv.errors import (
    HarnessError,
    PartialRemovalRefused,
    ScenarioFailed,
    Unsupported,
    Untestable,
    WorkerDied,
    WorkerTimeout,
)
from pyllamakv.scenarios import scenario
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.lab import Lab
from pyllamakv.scenarios.outcome import classify
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.scenarios.scenario import CACHES, Scenario
from pyllamakv.verification import discovery

#: Planted faults of stock, which a build with defragmentation does not have.
FIXES = (
    "fragmented",
    "restore-fragmented",
    "retry-between-ubatches",
    "parallel-clients",
    "truncated-prompts",
)
GUARDS = (
    "fork-then-defrag",
    "fail-between-ubatches",
    "shift-then-defrag",
    "defrag-without-shift",
    "used-count",
)


class Forgetful(SimulatedNative):
    """Lose the cells of the highest sequence when defragmenting."""

    def defrag(self, context):
        report = super().defrag(context)
        self._get(context).cache.remove(1)
        return report


class Swapping(SimulatedNative):
    """Swap the data of two cells when defragmenting, and keep their labels."""

    def defrag(self, context):
        report = super().defrag(context)
        cache = self._get(context).cache
        cache.rows[:, [0, 1]] = cache.rows[:, [1, 0]]
        return report


class Ghostly(SimulatedNative):
    """Leave the first micro-batches of a failed decode behind."""

    def __init__(self):
        super().__init__(rolls_back=False)


class Crashing(SimulatedNative):
    """End the worker in a defragmentation."""

    def defrag(self, context):
        raise WorkerDied("ended by SIGABRT", signal=6)


class Dying(SimulatedNative):
    """End the worker in a restore."""

    def state_load(self, context, seq, data):
        raise WorkerDied("ended by SIGABRT", signal=6)


class Hanging(SimulatedNative):
    """Hang in a defragmentation."""

    def defrag(self, context):
        raise WorkerTimeout("no answer")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def run(make, name: str, setting=CACHES[0]):
    with ScenarioRunner(Opener(make)) as bench:
        return bench.run(Path("lib"), discovery.find(name), setting)


@pytest.mark.parametrize("name", FIXES)
def test_fix_passes_only_with_defragmentation(name: str) -> None:
    """A library that defragments on demand passes, one without it fails."""
    assert run(lambda: SimulatedNative(), name).outcome.failure == "claim"
    healed = run(lambda: SimulatedNative(heals=True), name)
    assert healed.outcome.status == "pass", healed.outcome.message


@pytest.mark.parametrize("name", GUARDS)
def test_guard_passes_on_a_correct_library(name: str) -> None:
    """A guard passes on a library without faults."""
    found = run(lambda: SimulatedNative(heals=True), name)
    assert found.outcome.status == "pass", found.outcome.message
    assert found.pictures


@pytest.mark.parametrize(
    ("make", "name", "failure"),
    [
        (Forgetful, "fork-then-defrag", "lost"),
        (Swapping, "fork-then-defrag", "data"),
        (Ghostly, "fail-between-ubatches", "lost"),
        (Crashing, "fork-then-defrag", "crash"),
        (Dying, "restore-fragmented", "crash"),
        (Hanging, "fork-then-defrag", "hang"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_failures_have_the_expected_class(make, name: str, failure: str) -> None:
    """Each failure has the right class."""
    found = run(make, name)
    assert (found.outcome.status, found.outcome.failure) == ("fail", failure)
    assert found.outcome.message


def test_damaged_cells_are_found_by_logits() -> None:
    """Where bytes cannot be compared, the reference's logits show the damage."""

    class Mute(SimulatedNative):
        def decode(self, *arguments):
            status = super().decode(*arguments)
            cache = self._get(arguments[0]).cache
            if cache.size == 256 and len(cache.used) > 200:
                cache.slots[0].token += 1
            return status

    def workload(lab: Lab) -> None:
        player = lab.player(256)
        player.fill({0: 220})
        lab.verify(player)

    with ScenarioRunner(Opener(Mute)) as bench:
        found = bench.run(Path("lib"), Scenario("x", "guard", "", "", workload), CACHES[0])
    assert found.outcome.failure == "data"
    assert found.difference > 1


def test_crash_ends_only_its_own_run() -> None:
    """The next run gets a new worker, and a failed claim keeps the old one."""
    opener = Opener(Crashing)
    with ScenarioRunner(opener) as bench:
        crashing, claiming = discovery.find("fork-then-defrag"), discovery.find("fragmented")
        assert bench.run(Path("lib"), claiming, CACHES[0]).outcome.failure == "claim"
        assert bench.run(Path("lib"), claiming, CACHES[1]).outcome.failure == "claim"
        assert len(opener.opened) == 1
        assert bench.run(Path("lib"), crashing, CACHES[0]).outcome.failure == "crash"
        assert opener.opened[0].closed
        assert bench.run(Path("lib"), claiming, CACHES[0]).outcome.failure == "claim"
        assert len(opener.opened) == 2
    assert opener.opened[1].closed


def test_an_environment_gets_a_worker_of_its_own() -> None:
    """Variables are read once per process, so they are not mixed."""
    opener = Opener(lambda: SimulatedNative(heals=True))
    with ScenarioRunner(opener) as bench:
        for setting in (CACHES[0], scenario.MOVERS[0], CACHES[0]):
            bench.run(Path("lib"), discovery.find("fragmented"), setting)
    always = dict(scenario.CONTIGUOUS)
    assert opener.environments == [always, always | dict(scenario.MOVERS[0].environment)]


def test_a_setting_overrides_the_environment_of_its_scenario() -> None:
    """A release with scattered slots uses them if the setting requires it."""
    opener = Opener(lambda: SimulatedNative(heals=True))
    with ScenarioRunner(opener) as bench:
        bench.run(Path("lib"), discovery.find("fragmented"), scenario.SCATTERED)
    assert opener.environments == [{"LLAMA_SET_ROWS": "1"}]


def test_run_closes_all_contexts() -> None:
    """The worker has no context left after a run."""
    opener = Opener(lambda: SimulatedNative(heals=True))
    with ScenarioRunner(opener) as bench:
        bench.run(Path("lib"), discovery.find("fragmented"), CACHES[0])
        native = opener.opened[0].native
        assert native.created.count("context") == native.freed.count("context") >= 2


@pytest.mark.parametrize(
    ("error", "status", "failure"),
    [
        (ScenarioFailed("x", failure="lost"), "fail", "lost"),
        (Untestable("x"), "skip", ""),
        (Unsupported("x"), "absent", ""),
        (PartialRemovalRefused("x"), "absent", ""),
        (WorkerTimeout("x"), "fail", "hang"),
        (WorkerDied("x"), "fail", "crash"),
        (HarnessError("x"), "fault", ""),
        (KeyError("x"), "fault", ""),
    ],
)
def test_exceptions_are_classified_as_library_or_harness_failures(
    error, status: str, failure: str
) -> None:
    """An error of the harness is never reported as a failure of the library."""
    outcome = classify(error)
    assert (outcome.status, outcome.failure) == (status, failure)


def test_missing_capability_gives_the_status_absent() -> None:
    """A capability that a build lacks is not a failure."""
    none = Capability(0)
    assert run(lambda: SimulatedNative(capabilities=none), "counters").outcome.status == "absent"


@pytest.mark.parametrize(("backend", "error"), [("cpu", Unsupported), ("cuda", Untestable)])
def test_mapped_cache_is_required_only_in_host_memory(backend: str, error: type) -> None:
    """On a device the feature is not expected; in host memory the patch must provide it."""

    class Unmapped(SimulatedNative):
        def context_new(self, model, params):
            raise Unsupported("kv_backing has no effect here")

    native = Unmapped()
    lab = Lab(
        native, native.model_load("tiny", ModelParams()), CACHES[0], place=DevicePlacement(backend)
    )
    with pytest.raises(error, match="has no effect here"):
        lab.player(256, kv_backing=1)
    with pytest.raises(Untestable):
        lab.player(256)


@pytest.mark.parametrize(("backend", "bound"), [("cpu", 0.02), ("vulkan", 0.02), ("cuda", 0.1)])
def test_logit_tolerance_depends_on_the_backend(backend: str, bound: float) -> None:
    """Correct caches of devices differ more; a damaged cache differs by 0.3 or more."""
    native = SimulatedNative()
    lab = Lab(
        native, native.model_load("tiny", ModelParams()), CACHES[0], place=DevicePlacement(backend)
    )
    assert lab.tolerance.exact == bound


def test_without_readable_cells_positions_are_checked() -> None:
    """A library without readable cells is verified by the ends of its sequences."""

    class Blind(Forgetful):
        def __init__(self) -> None:
            super().__init__(capabilities=Capability.DEFRAG | Capability.STATES)

    with ScenarioRunner(Opener(Blind)) as bench:

        def workload(lab: Lab) -> None:
            player = lab.player(256)
            player.fill({0: 16, 1: 16}, interleave=True)
            player.remove(0, 0, 8)
            player.defrag()
            player.check_cells()

        found = bench.run(Path("lib"), Scenario("x", "guard", "", "", workload), CACHES[0])
    assert found.outcome.failure == "lost"


def test_scenario_with_an_unaligned_context_size_is_a_fault() -> None:
    """Flash attention would pad the cache, which changes the meaning of the scenario."""

    def workload(lab: Lab) -> None:
        lab.player(100)

    with ScenarioRunner(Opener(SimulatedNative)) as bench:
        found = bench.run(Path("lib"), Scenario("x", "guard", "", "", workload), CACHES[0])
    assert found.outcome.status == "fault"
    assert "256" in found.outcome.message


def test_distance_of_logits_with_nan_is_infinite() -> None:
    """What is not a number is infinitely far away."""
    from pyllamakv.scenarios.reference import distance

    one = np.zeros(4, dtype=np.float32)
    assert distance(one, one + 0.5) == 0.5
    assert distance(one, np.array([0, np.nan, 0, 0], dtype=np.float32)) == float("inf")
